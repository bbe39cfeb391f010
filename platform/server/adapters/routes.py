"""Routes that list adapters, and, where there is an admin key, those that change them.

Paths and fields are vLLM's and SGLang's. `Auth` has checked the key before anything is read here,
and each route that changes something asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import pydantic
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from plait.adapters.info import AdapterLevel, AdapterState
from plait.adapters.registry import Wish, is_generation
from plait.platform.errors import AdapterNotFound, BadRequest
from plait.platform.server.adapters.resolve import visible
from plait.platform.server.auth import needs_admin_key
from plait.platform.server.errors import InvalidRequestBody
from plait.platform.server.openapi import takes
from plait.platform.server.responses import encode
from plait.platform.server.schemas import LoadAdapterRequest, UnloadAdapterRequest

if TYPE_CHECKING:
    from plait.adapters.registry import Named
    from plait.platform.server.context import ServerContext

Schema = TypeVar("Schema", bound=pydantic.BaseModel)
_UNKNOWN = AdapterState(level=AdapterLevel.HOST)  # loaded, and the engine has not told yet


def adapters_router(context: ServerContext) -> APIRouter:
    """Routes that everybody may ask, each for the adapters that it may use."""
    router = APIRouter()

    @router.get("/v1/lora_adapters")
    async def list_adapters(request: Request) -> Response:
        """The loaded adapters: generation, place, memory, leases, report."""
        entries = visible(context, request.state.access)
        return _json({"object": "list", "data": [_described(context, n) for n in entries]})

    @router.get("/v1/lora_adapters/{name}")
    async def retrieve_adapter(name: str, request: Request) -> Response:
        """One loaded adapter."""
        for named in visible(context, request.state.access):
            if named.name == name:
                return _json(_described(context, named))
        raise AdapterNotFound(f"no adapter {name[:64]!r} is loaded", param="lora_name")

    return router


def admin_router(context: ServerContext) -> APIRouter:
    """Routes that change what is loaded."""
    router = APIRouter(dependencies=[Depends(_admins_only)])

    @router.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterRequest))
    @router.post("/load_lora_adapter", include_in_schema=False)
    async def load_adapter(request: Request) -> Response:
        """Load a folder of the adapter directory under a name; 200 once it can be used."""
        body = await _read(context, request, LoadAdapterRequest)
        wish = Wish(
            name=body.lora_name,
            replace=body.load_inplace,
            expected_generation=_generation(body.expected_generation),
            pinned=body.pinned,
            allow_zero_delta=body.allow_zero_delta,
        )
        owner = request.state.key_digest
        named = await context.adapters.load_path(wish, body.lora_path, owner=owner)
        return _loaded(context, request, named)

    @router.post("/v1/load_lora_adapter_from_tensors", include_in_schema=False)
    @router.post("/load_lora_adapter_from_tensors", openapi_extra=_TENSORS)
    async def load_tensors(request: Request) -> Response:
        """Load an adapter from the body: a safetensors file. 200 once it can be used."""
        query = _tensor_query(request)
        wish = Wish(
            name=query.lora_name,
            replace=query.load_inplace,
            expected_generation=_generation(query.expected_generation),
            pinned=query.pinned,
            allow_zero_delta=query.allow_zero_delta,
        )
        named = await context.adapters.load_tensors(
            wish, query.config.encode(), await request.body(), owner=request.state.key_digest
        )
        return _loaded(context, request, named)

    @router.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterRequest))
    @router.post("/unload_lora_adapter", include_in_schema=False)
    async def unload_adapter(request: Request) -> Response:
        """Forget a name at once. Requests that use it go on; then its memory is free."""
        body = await _read(context, request, UnloadAdapterRequest)
        named = await context.adapters.unload(
            body.lora_name, expected_generation=_generation(body.expected_generation)
        )
        if _wants_text(request):
            return PlainTextResponse(f"Success: LoRA adapter '{named.name}' removed successfully.")
        leases = context.adapters.registry.num_leases(named.generation)
        return _json({"success": True, "generation": named.generation, "leases": leases})

    return router


async def _admins_only(request: Request) -> None:
    """`Auth` knows these routes by their paths; a path that it took for another ends here."""
    if not request.state.access.is_admin:
        raise needs_admin_key()


class TensorQuery(pydantic.BaseModel):
    """The query of a load from tensors: the body is nothing but the safetensors file."""

    model_config = pydantic.ConfigDict(extra="forbid")
    lora_name: str
    config: str  # the text of adapter_config.json
    load_inplace: bool = False
    expected_generation: str | None = None
    pinned: bool = False
    allow_zero_delta: bool = False


_TENSORS: dict[str, Any] = {
    "parameters": [
        {"name": name, "in": "query", "required": field.is_required(), "schema": {"type": kind}}
        for name, field in TensorQuery.model_fields.items()
        for kind in ("boolean" if field.annotation is bool else "string",)
    ],
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    },
}


def _tensor_query(request: Request) -> TensorQuery:
    try:
        return TensorQuery.model_validate(dict(request.query_params))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0])[:64]
        raise InvalidRequestBody(f"query: {name}: {first['msg']}", param=name) from None


async def _read(context: ServerContext, request: Request, schema: type[Schema]) -> Schema:
    """The body, checked; whatever is wrong with it has one code here."""
    try:
        return await context.read(request, schema)
    except BadRequest as error:
        if error.code == "invalid_json":
            raise
        raise InvalidRequestBody(error.message, param=error.param) from None


def _generation(text: str | None) -> str | None:
    if text is not None and not is_generation(text):
        raise InvalidRequestBody(
            "expected_generation is 64 lower-case hexadecimal digits", param="expected_generation"
        )
    return text


def _wants_text(request: Request) -> bool:
    """VLLM's clients read a line; who asks for anything else gets JSON."""
    return request.headers.get("accept", "").partition(";")[0].strip() == "text/plain"


def _loaded(context: ServerContext, request: Request, named: Named) -> Response:
    if _wants_text(request):
        return PlainTextResponse(f"Success: LoRA adapter '{named.name}' added successfully.")
    return _json({"success": True, **_described(context, named)})


def _described(context: ServerContext, named: Named) -> dict[str, Any]:
    info = named.info
    state = context.client.adapter_states.get(named.generation, _UNKNOWN)
    return {
        "name": named.name,
        "generation": named.generation,
        "parent": context.model_name,
        "pinned": named.pinned,
        "created": named.created,
        "level": state.level,
        "leases": context.adapters.registry.num_leases(named.generation),
        "waiting": state.waiting,
        "num_bytes": info.num_bytes,
        "device_bytes": info.device_bytes,
        "device_dtype": info.device_dtype,
        "base_model": _public(info.base_model),
        "bundle": named.bundle is not None,
        "report": info.report,
    }


def _public(base_model: str) -> str:
    """A base's name as its config gives it; of a path on the trainer's machine the last part."""
    parts = base_model.replace("\\", "/").rstrip("/").split("/")
    is_path = len(parts) > 2 or parts[0] in ("", ".", "..", "~") or "\\" in base_model
    return parts[-1] if is_path else base_model


def _json(value: dict[str, Any]) -> Response:
    return Response(encode(value), media_type="application/json")
