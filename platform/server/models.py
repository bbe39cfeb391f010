"""/v1/models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.responses import Response

from plait.platform.server.responses import Model, ModelList, encode

if TYPE_CHECKING:
    from plait.platform.server.context import ServerContext


def models_router(context: ServerContext) -> APIRouter:
    """Routes of this family."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        """What is served; a client may use any of the ids as `model`."""
        return _json(ModelList(data=[_model(context)]))

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        """One served model."""
        context.check_model(model_id)
        return _json(_model(context))

    return router


def _model(context: ServerContext) -> Model:
    name, config = context.model_name, context.client.config
    return Model(
        id=name,
        created=context.created,
        root=name,
        max_model_len=None if config is None else config.scheduler.max_model_len,
    )


def _json(value: Model | ModelList) -> Response:
    return Response(encode(value), media_type="application/json")
