"""The OpenAPI document: bodies are read by our own strict parser, so they are described here."""

from __future__ import annotations

from typing import Any

import pydantic
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_REF = "#/components/schemas/{model}"
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "Something in the request cannot be served; `param` names it.",
    "401": "Missing or wrong API key.",
    "404": "No such model.",
    "408": "The request's deadline passed.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "503": "Full, starting or shutting down; see Retry-After.",
}


def takes(schema: type[pydantic.BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is `schema`."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=schema.__name__)}}}
    errors = {status: _error(text) for status, text in _STATUSES.items()}
    return {"requestBody": {"required": True, "content": content}, "responses": errors}


def _error(description: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model="Error")}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def describe(app: FastAPI, schemas: list[type[pydantic.BaseModel]]) -> None:
    """Let `app.openapi` give the document with all body schemas in it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components["Error"] = _ERROR_SCHEMA
            for schema in schemas:
                body = schema.model_json_schema(ref_template=_REF)
                components.update(body.pop("$defs", {}))
                components[schema.__name__] = body
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
