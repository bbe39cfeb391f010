"""Errors as HTTP: OpenAI's body for every route and status, one sanitiser for every message.

The SDKs retry 408, 409, 429 and 5xx unless `x-should-retry: false` says that it is of no use.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from plait.platform.core import Event, InvalidParameter
from plait.platform.errors import (
    AdapterBusy,
    AdapterError,
    BadRequest,
    DeadlineExceeded,
    EngineDied,
    GrammarTooComplex,
    InternalError,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
    Overloaded,
    PlaitError,
    UnsupportedSchemaKeyword,
    by_code,
)

log = logging.getLogger("plait.server")


class BodyTooLarge(BadRequest):
    """The HTTP body is larger than the server takes."""

    code = "body_too_large"
    status = 413


class InvalidRequestBody(BadRequest):
    """An admin's request lacks a field, or has one that does not exist or has a wrong type."""

    code = "invalid_request_body"


class WrongContentType(BadRequest):
    """The HTTP body is not declared as JSON."""

    code = "unsupported_media_type"
    status = 415


class HeadersTooLarge(BadRequest):
    """Too many header fields, or too many bytes of them."""

    code = "headers_too_large"
    status = 431


class RouteNotFound(BadRequest):
    """No such path here."""

    code = "not_found"
    type = "not_found_error"
    status = 404


class MethodNotAllowed(BadRequest):
    """The path exists, but not with this method."""

    code = "method_not_allowed"
    status = 405


class Aborted(PlaitError):
    """The server ended the request before its answer was complete; it can be retried."""

    code = "aborted"
    type = "overloaded_error"
    status = 503


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}\b")
_PATH = re.compile(r"(?:(?<![\w./:-])/(?!v1/)|\b[A-Za-z]:\\)[\w.@+~-]+(?:[/\\][\w.@+~-]+)+")
_TRACE = re.compile(r"Traceback \(most recent call last\).*", re.DOTALL)


def sanitise(message: str) -> str:
    """`message` without file paths, memory addresses and traces."""
    for pattern, replacement in ((_TRACE, "…"), (_ADDRESS, "0x…"), (_PATH, "…")):
        message = pattern.sub(replacement, message)
    return message


# Their messages name places in a schema by JSON pointers, which look like paths.
_WITH_POINTERS = (
    GrammarTooComplex,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
    UnsupportedSchemaKeyword,
)
_FILE = re.compile(r"(?:/|\b[A-Za-z]:\\)[\w./\\@+~-]+\.(?:cc|cpp|h|py|rs|so)\b(?::\d+)*")


def _shown(error: PlaitError) -> str:
    if isinstance(error, _WITH_POINTERS):
        return _ADDRESS.sub("0x…", _FILE.sub("…", _TRACE.sub("…", error.message)))
    return sanitise(error.message)


def as_plait_error(error: Exception, request_id: str) -> PlaitError:
    """The error to show for `error`; what was not foreseen is logged with its trace."""
    if isinstance(error, PlaitError):
        if error.status == InternalError.status:
            log.error("%s: %s", request_id, error.message)
        return error
    if isinstance(error, InvalidParameter):
        return BadRequest(str(error), param=error.param)
    log.error("%s: unforeseen error", request_id, exc_info=error)
    return InternalError(f"the server failed on this request; its log has request {request_id}")


def error_body(error: PlaitError) -> dict[str, Any]:
    """OpenAI's error body, also used inside streams; with the report of a refused adapter."""
    body: dict[str, Any] = {
        "error": {
            "message": _shown(error),
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
    if isinstance(error, AdapterError) and error.report is not None:
        body["report"] = error.report
    return body


def error_headers(error: PlaitError) -> dict[str, str]:
    """Headers that tell a client whether and when to try again."""
    if isinstance(error, Overloaded):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, EngineDied | Aborted | AdapterBusy):
        return {"retry-after": "1"}
    if isinstance(error, DeadlineExceeded) or error.status == InternalError.status:
        return {"x-should-retry": "false"}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    return {}


def error_response(error: PlaitError) -> Response:
    """The HTTP response for an error."""
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        headers=error_headers(error),
        media_type="application/json",
    )


def event_error(event: Event) -> PlaitError | None:
    """The error that ended a sequence, None where it ended well or has not ended."""
    if event.error is not None:
        code, message = event.error
        return by_code(code)(message)
    if event.finish_reason == "abort":
        return Aborted("the server ended this request before its answer was complete")
    if event.finish_reason == "error":
        return InternalError("the engine failed on this request")
    return None


async def handle_error(request: Request, error: Exception) -> Response:
    """Handler for everything that a route raises."""
    return error_response(as_plait_error(error, request.state.request_id))


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Handler for what routing itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"], request.method
    headers = dict(error.headers or {})
    mapped: PlaitError
    if error.status_code == 404:
        mapped = RouteNotFound(f"there is no {path} here; /openapi.json lists what there is")
    elif error.status_code == 405:
        allowed = headers.get("Allow") or headers.get("allow") or "another method"
        mapped = MethodNotAllowed(f"{path} does not take {method}; use {allowed}")
    else:
        mapped = BadRequest(str(error.detail))
        mapped.status = error.status_code
    response = error_response(mapped)
    response.headers.update(headers)
    return response
