"""Calls and results in the messages that a client sends back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from plait.platform.errors import BadRequest
from plait.structured.tools.request import MAX_TOOLS


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has calls or results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def read_calls(value: Any, at: str) -> list[dict[str, Any]]:
    """An assistant's `tool_calls` as templates take them, with arguments as objects."""
    if not isinstance(value, list | tuple) or len(value) > MAX_TOOLS:
        raise BadRequest(f"{at} is a list of at most {MAX_TOOLS} calls", param=at)
    return [_call(call, f"{at}[{i}]") for i, call in enumerate(value)]


def _call(call: Any, at: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise BadRequest(f"{at} is an object with id, type and function", param=at)
    function = call["function"]
    name, given = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{at}.function.name must be a string", param=f"{at}.function.name")
    if given is not None and not isinstance(given, str):
        raise BadRequest(f"{at}.id must be a string", param=f"{at}.id")
    where = f"{at}.function.arguments"
    made = {"name": name, "arguments": _arguments(function.get("arguments"), where)}
    return {"id": given or "", "type": "function", "function": made}


def _arguments(value: Any, at: str) -> dict[str, Any]:
    """OpenAI's are JSON text; models that take none may have been given an empty one."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{at} is no JSON: {str(error)[:200]}", param=at) from None
    if not isinstance(value, Mapping):
        raise BadRequest(f"{at} must be the JSON text of an object", param=at)
    return dict(value)
