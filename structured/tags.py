"""Structural tags: their schemas are proven one by one, since the whole runs on xgrammar."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from plait.platform.errors import InvalidGrammar, UnsupportedSchemaKeyword
from plait.structured.router import Route, refused, xgrammar_version
from plait.structured.schema import prove
from plait.structured.schema.limits import Limits, check_bounds
from plait.structured.schema.meaning import NARROW_OPTIONS
from plait.structured.schema.normalise import normalise
from plait.structured.schema.whitespace import MAX_RUN
from plait.structured.spec import GrammarKind, GrammarSpec

_STYLES = ("json",)  # in other markups values are no JSON, and xgrammar is not proven for them


def route_tag(spec: GrammarSpec) -> Route:
    """The route of a structural tag, with each JSON schema in it normalised and proven."""
    if not isinstance(spec.content, dict):
        raise InvalidGrammar("a structural tag is a JSON object", param=spec.param)
    check_bounds(spec.content, Limits(), spec.param)
    if xgrammar_version() not in prove.PROVEN_XGRAMMAR:
        raise InvalidGrammar(
            f"structural tags are not proven for xgrammar {xgrammar_version()}", param=spec.param
        )
    content = _proven(_modern(spec.content), "", spec)
    _check(content, spec)
    return Route(backend="xgrammar", kind=GrammarKind.STRUCTURAL_TAG, content=content)


def _modern(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form, of structures and triggers, in the newer one."""
    if "structures" not in tag:
        return tag
    try:
        tags = [
            {
                "type": "tag",
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each.get("schema") or {}},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError):
        raise InvalidGrammar("'structures' need begin, schema and end each") from None
    return {"type": "structural_tag", "format": form}


def _proven(node: Any, at: str, spec: GrammarSpec) -> Any:
    if isinstance(node, list):
        return [_proven(each, f"{at}/{i}", spec) for i, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema" and "json_schema" in node:
        return node | {"json_schema": _schema(node, at, spec), "max_whitespace_cnt": MAX_RUN}
    return {key: _proven(inner, f"{at}/{key}", spec) for key, inner in node.items()}


def _schema(node: dict[str, Any], at: str, spec: GrammarSpec) -> Any:
    if node.get("style", "json") not in _STYLES or node.get("any_order"):
        raise UnsupportedSchemaKeyword(
            f"'style' or 'any_order' at {at}: not proven exact; use the style 'json', in order",
            param=spec.param,
        )
    found = normalise(node["json_schema"], replace(spec, options=NARROW_OPTIONS))
    if found.refusals:
        raise refused(found.refusals[0], spec.param)
    for doubt in prove.doubts(found.schema):
        raise UnsupportedSchemaKeyword(
            f"{doubt.keyword!r} in the schema at {at}/json_schema: inside of a structural tag "
            f"xgrammar does not enforce it ({doubt.why}); leave it out, or constrain the whole "
            "answer by 'json_schema'",
            param=spec.param,
        )
    return found.schema


def _check(content: dict[str, Any], spec: GrammarSpec) -> None:
    import xgrammar

    try:
        xgrammar.Grammar.from_structural_tag(json.dumps(content))
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("\n", 1)[0][:300]
        raise InvalidGrammar(
            f"the structural tag cannot be read: {reason}", param=spec.param
        ) from None
