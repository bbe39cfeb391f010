"""A client's tools and its wishes about them, checked. Names are OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.platform.errors import BadRequest, Unsupported

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
_CHOICES = "tool_choice is none, auto, required, or {type: function, function: {name}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function that the model may call."""

    name: str
    description: str
    parameters: Any  # a JSON schema
    strict: bool
    param: str  # where the request has its schema, for errors
    given: Mapping[str, Any]  # as the client wrote it, for the template


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWish:
    """Tools, which of them may be called, and whether one must be."""

    tools: tuple[Tool, ...]  # all that the prompt shows
    callable: tuple[Tool, ...]  # those that may be called
    required: bool
    parallel: bool  # several calls in one reply


def read_tools(
    tools: Sequence[Any] | None, choice: Any = None, parallel: bool | None = None
) -> ToolWish | None:
    """What the fields ask for; None where no tool may be called. Raises `BadRequest`."""
    if tools is None:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        if parallel is not None:
            _switch(parallel)
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise BadRequest("tools is a list of functions", param="tools")
    if not tools:
        raise BadRequest("tools is empty: leave it out, or name at least one", param="tools")
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"{len(tools)} tools are over the limit of {MAX_TOOLS}", param="tools")
    read = tuple(_tool(each, f"tools[{i}]") for i, each in enumerate(tools))
    names = [tool.name for tool in read]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadRequest(f"tools: two have the name {twice!r}", param="tools")
    chosen, required = _chosen(read, choice)
    several = True if parallel is None else _switch(parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        several = False  # who names a function reads one call of it, OpenAI's clients too
    if not chosen:
        return ToolWish(tools=read, callable=(), required=False, parallel=several)
    return ToolWish(tools=read, callable=chosen, required=required, parallel=several)


def _switch(parallel: Any) -> bool:
    if not isinstance(parallel, bool):
        raise BadRequest("parallel_tool_calls is true or false", param="parallel_tool_calls")
    return parallel


def _tool(given: Any, at: str) -> Tool:
    if not isinstance(given, Mapping):
        raise BadRequest(f"{at} must be an object with type and function", param=at)
    if given.get("type", "function") != "function":
        raise Unsupported(f"{at}.type: only functions are served", param=f"{at}.type")
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"{at}.function must be an object", param=f"{at}.function")
    unknown = sorted(set(function) - _FUNCTION_KEYS, key=str)
    if unknown:
        shown = str(unknown[0])[:64]
        raise BadRequest(f"{at}.function: unknown key {shown!r}", param=f"{at}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise BadRequest(
            f"{at}.function.name takes 1 to 128 letters, digits and _.-",
            param=f"{at}.function.name",
        )
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise BadRequest(
            f"{at}.function.description must be a string", param=f"{at}.function.description"
        )
    strict = function.get("strict") or False
    if not isinstance(strict, bool):
        raise BadRequest(f"{at}.function.strict is true or false", param=f"{at}.function.strict")
    return Tool(
        name=name,
        description=description,
        parameters=_parameters(function.get("parameters"), f"{at}.function.parameters"),
        strict=strict,
        param=f"{at}.function.parameters",
        given=given,
    )


def _parameters(schema: Any, at: str) -> Any:
    """A function without parameters takes an empty object, as OpenAI has it."""
    if schema is None or schema == {}:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{at} is a JSON schema: an object", param=at)
    kind = schema.get("type", "object")
    if kind != "object":
        raise BadRequest(f"{at}: arguments are an object, so its type is 'object'", param=at)
    return {"type": "object", **schema}


def _chosen(tools: tuple[Tool, ...], choice: Any) -> tuple[tuple[Tool, ...], bool]:
    """The tools that may be called, and whether one must."""
    if choice is None or choice == "auto":
        return tools, False
    if choice == "none":
        return (), False
    if choice == "required":
        return tools, True
    if not isinstance(choice, Mapping):
        raise BadRequest(_CHOICES, param="tool_choice")
    if choice.get("type") == "function":
        return (_named(tools, choice, "tool_choice"),), True
    if choice.get("type") == "allowed_tools":
        return _allowed(tools, choice.get("allowed_tools", choice))
    raise BadRequest(_CHOICES, param="tool_choice")


def _named(tools: tuple[Tool, ...], choice: Any, at: str) -> Tool:
    # The Responses API has the name at the top.
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        known = ", ".join(tool.name for tool in tools[:10])
        raise BadRequest(f"{at} names no tool of this request; there are {known}", param=at)
    return found


def _allowed(tools: tuple[Tool, ...], allowed: Any) -> tuple[tuple[Tool, ...], bool]:
    at = "tool_choice.allowed_tools"
    named = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(named, list) or not named:
        raise BadRequest(f"{at} needs tools, at least one", param=at)
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise BadRequest(f"{at}.mode is auto or required", param=at)
    kept = {_named(tools, each, f"{at}.tools[{i}]").name for i, each in enumerate(named)}
    return tuple(tool for tool in tools if tool.name in kept), mode == "required"
