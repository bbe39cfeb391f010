"""/v1/models: the served model, and the adapters that the caller may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from plait.platform.server.adapters.resolve import not_found, visible
from plait.platform.server.responses import Model, ModelList, encode

if TYPE_CHECKING:
    from plait.adapters.registry import Named
    from plait.platform.server.context import ServerContext


def models_router(context: ServerContext) -> APIRouter:
    """Routes of this family."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """What is served; a client may use any of the ids as `model`."""
        adapters = [_adapter(context, named) for named in visible(context, request.state.access)]
        return _json(ModelList(data=[_base(context), *adapters]))

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str, request: Request) -> Response:
        """One served model or adapter."""
        if model_id == context.model_name:
            return _json(_base(context))
        access = request.state.access
        for named in visible(context, access):
            if named.name == model_id:
                return _json(_adapter(context, named))
        raise not_found(context, access, model_id, "model")

    return router


def _base(context: ServerContext) -> Model:
    return _model(context, context.model_name, context.created, parent=None)


def _adapter(context: ServerContext, named: Named) -> Model:
    return _model(context, named.name, named.created, parent=context.model_name)


def _model(context: ServerContext, name: str, created: int, *, parent: str | None) -> Model:
    config = context.client.config
    return Model(
        id=name,
        created=created,
        root=name,
        parent=parent,
        max_model_len=None if config is None else config.scheduler.max_model_len,
    )


def _json(value: Model | ModelList) -> Response:
    return Response(encode(value), media_type="application/json")
