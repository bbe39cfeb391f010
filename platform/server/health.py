"""/health, /ready, /version and /load. The first two are open to everyone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from plait.platform.errors import Overloaded
from plait.platform.server.errors import error_response
from plait.platform.server.responses import encode

if TYPE_CHECKING:
    from plait.platform.server.context import ServerContext


def health_router(context: ServerContext) -> APIRouter:
    """Routes of this family."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)  # some load balancers want no body
    @router.get("/health")
    async def health() -> Response:
        """200 while the engine makes progress; restart the process where this stays 503."""
        if context.client.healthy:
            return _json({"status": "ok"})
        reason = context.client.unhealthy_reason or "the engine makes no progress"
        return error_response(Overloaded(reason, retry_after_s=2.0))

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken: 503 before the first and from the start of a drain."""
        context.admission.config()
        return _json({"status": "ok"})

    @router.get("/version")
    async def version() -> Response:
        """Plait's version."""
        return _json({"version": context.version})

    @router.get("/load")
    async def load() -> Response:
        """What the server is busy with."""
        stats, admission = context.client.stats, context.admission
        config = context.client.config
        capacity = None if config is None else admission.capacity(config.scheduler)
        return _json(
            {
                "server_load": admission.in_flight,  # vLLM's name
                "capacity": capacity,
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "kv_usage": stats.kv_usage,
            }
        )

    return router


def _json(value: dict[str, Any]) -> Response:
    return Response(encode(value), media_type="application/json")
