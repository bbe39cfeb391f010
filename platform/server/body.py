"""From the bytes of a body to a checked request schema.

Strict: no NaN or Infinity, no lone surrogates, no numbers in strings, no booleans as integers,
no unknown fields, no key twice, no nesting beyond the bound. Every refusal names the field, the
key or the position.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
import pydantic

from plait.platform.errors import BadRequest, PlaitError
from plait.platform.server.fields import split_fields
from plait.platform.server.settings import Limits, ServerSettings

Schema = TypeVar("Schema", bound=pydantic.BaseModel)

# pydantic's words for these speak of Python.
_PLAIN_WORDS = {
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "extra_forbidden": "there is no such field",
}
_MAX_OPTIONS = 16
_MAX_REF_FIELDS = 8  # of one adapter's name, generation and scale
# Fields with a bound of the same name in `Limits`.
_COUNTED = (
    "messages",
    "stop",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "chat_template_kwargs",
    "adapters",
    "lora",
)


def parse_body(raw: bytes, schema: type[Schema], settings: ServerSettings) -> Schema:
    """The request in `raw`. Raises `BadRequest`."""
    body = _decode(raw, settings.limits.json_depth)
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {_kind(body)}")
    fields = split_fields(body, schema.model_fields, allow_unknown=settings.allow_unknown_fields)
    _check_counts(fields, settings.limits)
    try:
        return schema.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _explain(error, fields) from None


def _check_counts(fields: dict[str, Any], limits: Limits) -> None:
    """Bounds on entries, before anything looks at each: a body has room for millions."""
    for name in _COUNTED:
        value = fields.get(name)
        if isinstance(value, list | dict):
            _at_most(name, "entries", len(value), getattr(limits, name))
    for name in ("stream_options", "speculation"):
        options = fields.get(name)
        if isinstance(options, dict):
            _at_most(name, "entries", len(options), _MAX_OPTIONS)
    for name in ("adapter", "adapters", "lora"):
        value = fields.get(name)
        for ref in value if isinstance(value, list) else [value]:
            if isinstance(ref, dict):
                _at_most(name, "entries", len(ref), _MAX_REF_FIELDS)
    messages = fields.get("messages")
    listed = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in listed if isinstance(message, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    _at_most("messages", "content parts", num_parts, limits.content_parts)


def _at_most(name: str, what: str, count: int, bound: int) -> None:
    if count > bound:
        raise BadRequest(f"{name}: {count} {what} are over the limit of {bound}", param=name)


def _decode(raw: bytes, max_depth: int) -> Any:
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _bad_json(raw, str(error)) from None
    _refuse_repeated_keys(raw, _num_keys(body, max_depth))
    return body


# Half of a surrogate pair: the first without the second, or the second alone.
_HALF = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2}))"
)


def _bad_json(raw: bytes, reason: str) -> PlaitError:
    found = re.search(r"\(byte (\d+)\)", reason)
    at = int(found[1]) if found else len(raw)
    half = _HALF.search(raw)
    if half is not None and half.start(1) <= at:
        at, reason = half.start(1), f"{half[1].decode()} is half of a surrogate pair"
    where = ""
    if found or half:
        line = raw.count(b"\n", 0, at) + 1
        column = at - (raw.rfind(b"\n", 0, at) + 1) + 1
        where = f" at line {line}, column {column}"
    error = BadRequest(f"the body is not valid JSON{where}: {reason}")
    error.code = "invalid_json"
    return error


def _too_deep(max_depth: int) -> BadRequest:
    return BadRequest(f"the JSON body nests deeper than {max_depth} levels")


def _num_keys(value: Any, limit: int) -> int:
    """Keys in all objects; breadth first, without recursion. Raises where they nest too deep."""
    level = [value] if isinstance(value, dict | list) else []
    depth = num_keys = 0
    while level:
        depth += 1
        if depth > limit:
            raise _too_deep(limit)
        below: list[Any] = []
        for container in level:
            items = container.values() if isinstance(container, dict) else container
            num_keys += len(container) if isinstance(container, dict) else 0
            below.extend(item for item in items if isinstance(item, dict | list))
        level = below
    return num_keys


_BEHIND_KEY = re.compile(rb'"[ \t\r\n]*:')  # text may have it too


def _refuse_repeated_keys(raw: bytes, num_keys: int) -> None:
    """Of two values under one key the last would win in silence.

    The fast decoder keeps one of them. Where `raw` has no more ends of keys than the `num_keys`
    that were kept, as in most bodies, none was lost; others are read a second time.
    """
    if len(_BEHIND_KEY.findall(raw)) == num_keys:
        return

    def unique(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) == len(pairs):
            return
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRequest(f"the body has the key {key[:64]!r} twice in one object")
            seen.add(key)

    json.loads(raw, object_pairs_hook=unique, parse_int=str, parse_float=str)


def _explain(error: pydantic.ValidationError, fields: dict[str, Any]) -> BadRequest:
    """One message about the first field at fault, with all its accepted forms.

    Of a field with several forms it is the form that fits furthest: what is wrong inside of it.
    """
    found = error.errors(include_url=False, include_context=False)
    paths = [_path(e["loc"], fields) for e in found]
    within = (path for path in paths if path.startswith((f"{paths[0]}.", f"{paths[0]}[")))
    place = next(within, paths[0])
    there = [e for e, path in zip(found, paths, strict=True) if path == place]
    if there[0]["type"] == "missing":
        return BadRequest(f"{place}: is required", param=place)
    reasons = dict.fromkeys(_PLAIN_WORDS.get(e["type"], e["msg"]) for e in there)
    text = f"{'; or: '.join(reasons)} (got {_kind(there[0]['input'])})"
    return BadRequest(f"{place}: {text}", param=place)


def _path(location: tuple[int | str, ...], value: Any) -> str:
    """`messages[0].content` for a location, without the names of union branches."""
    path = ""
    for step in location:
        if isinstance(value, dict) and (step in value or not path):
            path += f".{step}" if path else str(step)
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            path += f"[{step}]"
            value = value[step]
    return path


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    names |= {int: "an integer", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
