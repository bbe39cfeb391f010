"""Which constraint a request's fields ask for: OpenAI's, vLLM's, SGLang's and llama.cpp's words.

Exactly one of them may. What they mean is not looked at here, but by the router.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from plait.platform.errors import BadRequest, InvalidGrammar, InvalidSchema, Unsupported
from plait.structured.spec import GrammarKind, GrammarSpec

# Fields that hold a constraint, in the order in which they are read; hints stand below.
KINDS: dict[str, GrammarKind] = {
    "guided_json": GrammarKind.JSON_SCHEMA,
    "guided_regex": GrammarKind.REGEX,
    "guided_choice": GrammarKind.CHOICE,
    "guided_grammar": GrammarKind.GRAMMAR,
    "guided_json_object": GrammarKind.JSON_OBJECT,
    "json_schema": GrammarKind.JSON_SCHEMA,  # SGLang's is a text, llama.cpp's an object
    "regex": GrammarKind.REGEX,
    "ebnf": GrammarKind.GRAMMAR,
    "grammar": GrammarKind.GRAMMAR,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
FIELDS = frozenset({"response_format", "structured_outputs", "guided_whitespace_pattern", *KINDS})
_OUTPUTS: dict[str, GrammarKind] = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.GRAMMAR,
    "json_object": GrammarKind.JSON_OBJECT,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
_SWITCHES = (
    "any_whitespace",
    "any_form",
    "assert_formats",
    "disable_any_whitespace",
    "disable_additional_properties",
)
_OPTIONS = (*_SWITCHES, "whitespace_pattern")
# What they say something about; beside anything else they would have no effect.
_SCHEMAS = frozenset({GrammarKind.JSON_SCHEMA})
_JSON = _SCHEMAS | {GrammarKind.JSON_OBJECT}
_ABOUT: dict[str, frozenset[GrammarKind]] = {
    "any_whitespace": _JSON,
    "disable_any_whitespace": _JSON,
    "whitespace_pattern": _JSON,
    "any_form": _SCHEMAS,
    "assert_formats": _SCHEMAS,
    "disable_additional_properties": _SCHEMAS,
}
_DEFAULTS_SENT = frozenset(  # by vLLM's clients, as false
    {"any_whitespace", "disable_any_whitespace", "disable_additional_properties"}
)
# Of a schema's keywords: whose values map names to schemas, and whose are no schemas.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "default", "examples", "required"})
_FORMATS = "text, json_object, json_schema or structural_tag"


def read_constraint(fields: Mapping[str, Any]) -> GrammarSpec | None:
    """The one constraint among a request's fields, None without any. Raises `BadRequest`.

    `fields` maps those of `FIELDS` that the request has to what it says; null is absent.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    pattern = given.pop("guided_whitespace_pattern", None)
    found: list[GrammarSpec] = []
    readers: dict[str, Callable[[Any], GrammarSpec | None]] = {
        "response_format": _response_format,
        "structured_outputs": _structured_outputs,
    }
    for name, value in given.items():
        read = readers.get(name)
        spec = read(value) if read is not None else _plain(name, value)
        if spec is not None:
            found.append(spec)
    if len(found) > 1:
        names = " and ".join(spec.param for spec in found)
        raise BadRequest(f"{names} exclude each other: give one", param=found[1].param)
    if not found:
        if pattern is not None:
            raise BadRequest(
                "guided_whitespace_pattern needs a constraint", param="guided_whitespace_pattern"
            )
        return None
    return found[0] if pattern is None else _spaced(found[0], pattern)


def _spaced(spec: GrammarSpec, pattern: Any) -> GrammarSpec:
    """With a `guided_whitespace_pattern`."""
    param = "guided_whitespace_pattern"
    if spec.param.startswith("structured_outputs"):
        inner = "structured_outputs.whitespace_pattern"
        raise BadRequest(f"{param} and structured_outputs do not mix: use {inner}", param=param)
    spec = replace(spec, options={**spec.options, "whitespace_pattern": pattern})
    _check_options(spec)
    return spec


def _check_options(spec: GrammarSpec) -> None:
    """Refuse an option that has no effect on what is constrained."""
    for name, value in spec.options.items():
        idle = value is False and name in _DEFAULTS_SENT
        if spec.kind not in _ABOUT[name] and not idle:
            what = "JSON schemas" + " and json_object" * (GrammarKind.JSON_OBJECT in _ABOUT[name])
            param = spec.param_of(name)
            raise BadRequest(
                f"{param} is about {what} and has no effect on {spec.param}; leave it out",
                param=param,
            )


def _plain(name: str, value: Any) -> GrammarSpec | None:
    kind = KINDS[name]
    if kind is GrammarKind.JSON_OBJECT:
        return _switched(value, name)
    return GrammarSpec(kind=kind, content=_content(kind, value, name), param=name)


def _switched(value: Any, param: str) -> GrammarSpec | None:
    if not isinstance(value, bool):
        raise BadRequest(f"{param} is true or false", param=param)
    return GrammarSpec(kind=GrammarKind.JSON_OBJECT, param=param) if value else None


def _content(kind: GrammarKind, value: Any, param: str) -> Any:
    """The constraint itself; schemas and tags may come as JSON text."""
    if kind in (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG) and isinstance(value, str):
        return _parsed(value, param)
    if kind is GrammarKind.JSON_SCHEMA and not isinstance(value, Mapping | bool):
        raise BadRequest(f"{param} is a JSON schema: an object, or its text", param=param)
    if kind is GrammarKind.STRUCTURAL_TAG and not isinstance(value, Mapping):
        raise BadRequest(f"{param} is an object", param=param)
    if kind in (GrammarKind.REGEX, GrammarKind.GRAMMAR) and not isinstance(value, str):
        raise BadRequest(f"{param} is a string", param=param)
    if kind is GrammarKind.CHOICE and not (
        isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    ):
        raise BadRequest(f"{param} is a list of strings", param=param)
    if kind is GrammarKind.CHOICE and not value:
        raise InvalidGrammar(f"{param} is empty: give one choice at least", param=param)
    return list(value) if isinstance(value, tuple) else value


def _parsed(text: str, param: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return made

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InvalidSchema(f"{param} is no JSON: {str(error)[:200]}", param=param) from None
    if not isinstance(value, dict | bool):
        raise BadRequest(f"{param} is a JSON schema: an object, or its text", param=param)
    return value


def _response_format(value: Any) -> GrammarSpec | None:
    at = "response_format"
    if not isinstance(value, Mapping):
        raise BadRequest(f"{at} is an object with a type: {_FORMATS}", param=at)
    kind = value.get("type")
    if kind == "text":
        _known(value, {"type"}, at)
        return None
    if kind == "json_object":
        _known(value, {"type", "schema"}, at)
        if value.get("schema") is None:
            return GrammarSpec(kind=GrammarKind.JSON_OBJECT, param=at)
        return _schema(value["schema"], f"{at}.schema")
    if kind == "json_schema":
        _known(value, {"type", "json_schema", "schema"}, at)
        return _json_schema(value, at)
    if kind == "structural_tag":
        return GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, content=_tag(value, at), param=at)
    raise Unsupported(f"{at}.type is {_FORMATS}, not {str(kind)[:64]!r}", param=f"{at}.type")


def _schema(value: Any, param: str, *, strict: bool = False) -> GrammarSpec:
    content = _content(GrammarKind.JSON_SCHEMA, value, param)
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=content, param=param, strict=strict)


def _json_schema(value: Mapping[str, Any], at: str) -> GrammarSpec:
    """OpenAI's form with the schema inside of `json_schema`, or llama.cpp's beside `type`."""
    inner = value.get("json_schema")
    if inner is None:
        if value.get("schema") is None:
            raise BadRequest(f"{at}.json_schema is required", param=f"{at}.json_schema")
        return _schema(value["schema"], f"{at}.schema")
    at = f"{at}.json_schema"
    if not isinstance(inner, Mapping):
        raise BadRequest(f"{at} is an object with name and schema", param=at)
    _known(inner, {"name", "schema", "strict", "description"}, at)
    for key in ("name", "description"):
        if not isinstance(inner.get(key) or "", str):
            raise BadRequest(f"{at}.{key} is a string", param=f"{at}.{key}")
    strict = inner.get("strict") or False
    if not isinstance(strict, bool):
        raise BadRequest(f"{at}.strict is true or false", param=f"{at}.strict")
    if inner.get("schema") is None:
        raise BadRequest(f"{at}.schema is required", param=f"{at}.schema")
    return _schema(inner["schema"], f"{at}.schema", strict=strict)


def _tag(value: Mapping[str, Any], at: str) -> Any:
    """The tag itself, or with its content under `structural_tag` or `json`."""
    for key in ("structural_tag", "json"):
        if key in value:
            return _content(GrammarKind.STRUCTURAL_TAG, value[key], f"{at}.{key}")
    return dict(value)


def _structured_outputs(value: Any) -> GrammarSpec | None:
    at = "structured_outputs"
    if not isinstance(value, Mapping):
        raise BadRequest(f"{at} is an object with one of {', '.join(_OUTPUTS)}", param=at)
    given = {key: inner for key, inner in value.items() if inner is not None}
    # vLLM's clients send its defaults along.
    hints = {"_backend", "_backend_was_auto", "disable_fallback", "backend"}
    _known(given, {*_OUTPUTS, *_OPTIONS, *hints}, at)
    kinds = [key for key in _OUTPUTS if key in given and given[key] is not False]
    if len(kinds) > 1:
        raise BadRequest(f"{at}: {' and '.join(kinds)} exclude each other: give one", param=at)
    if not kinds:
        if "json_object" in given:
            return None
        raise BadRequest(f"{at} needs one of {', '.join(_OUTPUTS)}", param=at)
    kind, param = _OUTPUTS[kinds[0]], f"{at}.{kinds[0]}"
    options = {key: given[key] for key in _OPTIONS if key in given}
    for key in _SWITCHES:
        if not isinstance(options.get(key, False), bool):
            raise BadRequest(f"{at}.{key} is true or false", param=f"{at}.{key}")
    _check_options(GrammarSpec(kind=kind, param=param, options=options))
    closed = options.pop("disable_additional_properties", False)
    if kind is GrammarKind.JSON_OBJECT:
        spec = _switched(given["json_object"], param)
        return None if spec is None else replace(spec, options=options)
    content = _content(kind, given[kinds[0]], param)
    if closed and kind is GrammarKind.JSON_SCHEMA:
        content = _closed(content)
    return GrammarSpec(kind=kind, content=content, param=param, options=options)


def _closed(schema: Any) -> Any:
    """Every object that lists properties and says nothing of others takes no others."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key, inner in schema.items():
        if key in _MAPS and isinstance(inner, Mapping):
            made[key] = {name: _closed(each) for name, each in inner.items()}
        elif key not in _VALUES:
            made[key] = _closed(inner)
    lists = isinstance(schema.get("properties"), Mapping) and "type" in schema
    if lists and "additionalProperties" not in schema:
        made["additionalProperties"] = False
    return made


def _known(value: Mapping[str, Any], known: set[str], at: str) -> None:
    for key in value:
        if key not in known:
            shown = str(key)[:64]
            raise BadRequest(f"{at}: unknown key {shown!r}", param=f"{at}.{shown}")
