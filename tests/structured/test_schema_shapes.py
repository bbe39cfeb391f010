"""Shapes that schemas of configuration files have, each served, with jsonschema as the judge."""

from __future__ import annotations

import random

import jsonschema
import pytest
from support.schemas import acceptor, compact, mutate, sample, schema_spec

from plait.structured.router import route

DRAFT_7 = "http://json-schema.org/draft-07/schema#"

SHAPES = {
    "lists of tags beside a text": {
        "$schema": DRAFT_7,
        "type": "object",
        "properties": {
            "tags": {
                "oneOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                ]
            }
        },
    },
    "long lists of names": {
        "type": "object",
        "properties": {
            "topics": {
                "type": "array",
                "minItems": 1,
                "uniqueItems": True,
                "items": {"enum": [f"{kind} {i}" for kind in ("Alpha", "Beta") for i in range(80)]},
            }
        },
        "additionalProperties": False,
    },
    "a tree of tasks": {
        "definitions": {
            "task": {
                "type": "object",
                "properties": {
                    "title": {"type": "string", "minLength": 1},
                    "steps": {
                        "type": "array",
                        "uniqueItems": True,
                        "items": {"$ref": "#/definitions/task"},
                    },
                },
                "required": ["title"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/definitions/task",
    },
    "one definition behind several references": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "what it is called"},
                    "left": {"$ref": "#/$defs/node"},
                    "right": {"$ref": "#/$defs/other", "description": "the other one"},
                },
                "required": ["name"],
                "additionalProperties": False,
            },
            "other": {"$ref": "#/$defs/node"},
        },
        "type": "object",
        "properties": {
            "first": {"$ref": "#/$defs/node"},
            "second": {"$ref": "#/$defs/other"},
            "third": {"oneOf": [{"$ref": "#/$defs/other"}, {"type": "string"}]},
            "text": {"type": "string"},
            "short": {"type": "string", "maxLength": 2},
        },
        "additionalProperties": {"type": "string", "title": "anything else"},
    },
    "the same list in many places": {
        "definitions": {"paths": {"type": "array", "uniqueItems": True}},
        "type": "object",
        "properties": {"on": {"$ref": "#/definitions/paths"}},
        "patternProperties": {"^x-": {"$ref": "#/definitions/paths"}},
        "additionalProperties": {"type": "boolean"},
    },
    "two ways to write an object": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "files": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
                },
                "required": ["files"],
            },
            {"type": "object", "required": ["glob"], "properties": {"glob": {"type": "string"}}},
        ]
    },
    "one list or another": {
        "oneOf": [
            {"type": "array", "items": {"enum": ["top", "left"]}},
            {"type": "array", "items": {"enum": ["row", "column"]}},
        ]
    },
    "values that may hold the like": {
        "definitions": {
            "value": {
                "oneOf": [
                    {"type": ["string", "number"]},
                    {"type": "array", "items": {"$ref": "#/definitions/value"}},
                    {
                        "type": "object",
                        "required": ["kind"],
                        "properties": {"kind": {"const": "map"}},
                        "additionalProperties": {"$ref": "#/definitions/value"},
                    },
                    {
                        "type": "object",
                        "required": ["kind", "of"],
                        "properties": {
                            "kind": {"const": "one"},
                            "of": {"$ref": "#/definitions/value"},
                        },
                        "additionalProperties": False,
                    },
                ]
            }
        },
        "$ref": "#/definitions/value",
    },
    "names but one": {
        "type": "array",
        "items": {"type": "string", "pattern": "^(?!all$)[a-z]+$"},
        "uniqueItems": True,
    },
    "keys but one": {
        "type": "object",
        "patternProperties": {"^(?!meta$).*$": {"type": "integer"}},
        "properties": {"meta": {"type": "string"}},
        "additionalProperties": False,
    },
    "a dialect by another name": {
        "$schema": "https://json-schema.org/draft-07/schema",
        "definitions": {"text": {"type": "string"}},
        "type": "object",
        "properties": {"url": {"$ref": "#/definitions/text", "pattern": "^https?://"}},
        "additionalProperties": False,
    },
}


@pytest.mark.filterwarnings("ignore:The metaschema specified:DeprecationWarning")
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_real_schemas_are_served_exactly(name):
    schema, rng = SHAPES[name], random.Random(name)
    judge = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    found = route(schema_spec(schema))
    grammar = acceptor(found)
    counts = {True: 0, False: 0}
    for _ in range(80):
        value = sample(found.content, rng)
        for each in (value, mutate(value, rng), mutate(mutate(value, rng), rng)):
            valid = judge.is_valid(each)
            counts[valid] += 1
            if not valid:
                assert not grammar.accepts(compact(each)), each
            elif each is value:
                assert grammar.accepts(compact(each)), each
    assert min(counts.values()) > 5
