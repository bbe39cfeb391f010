"""Items that must not be repeated: by veto beside the masks, with jsonschema as the judge."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from support.constrained import compiled, drain, make_engine, request, text_of
from support.grammars import END, OTHER_END, WIDTH, allowed, compact, vocabulary
from support.schemas import mutate, sample, schema_spec

from plait.platform.core import FinishReason
from plait.platform.errors import UnsupportedSchemaKeyword
from plait.structured.matcher import Matcher, MatcherStore
from plait.structured.router import route
from plait.structured.schema import counting, regex
from plait.structured.spec import GrammarKind
from plait.structured.unique import Uniqueness
from plait.structured.unique_table import Item

STORE = MatcherStore()
MAX_BYTES = 400


def distinct(items: Any = True, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
COUNT = {"type": "integer"}

SERVED = {
    "strings": distinct(TEXT),
    "short strings": distinct({"type": "string", "maxLength": 1}, maxItems=3),
    "strings of a pattern": distinct({"type": "string", "pattern": "^[ab]{1,2}$"}),
    "versions": distinct({"type": "string", "pattern": "^v[0-9]+\\.json$"}),
    "many values": distinct({"enum": [*"abcdef", "ab", "abc", "é", "è", 'a"b', 1, 11, None]}),
    "all of its values": distinct({"enum": list("abcdefgh")}, minItems=8),
    "integers": distinct(COUNT, minItems=2),
    "few integers": distinct({"type": "integer", "minimum": 8, "maximum": 12}, minItems=5),
    "natural numbers": distinct({"type": "integer", "minimum": 0}, minItems=3),
    "below": distinct({"type": "integer", "maximum": 3}, minItems=2),
    "numbers": distinct({"type": "number"}, minItems=2),
    "anything": distinct(),
    "anything anywhere": {"uniqueItems": True},
    "mixed": distinct({"type": ["string", "integer", "null", "boolean"]}),
    "open objects": distinct({"type": "object", "properties": {"a": FLAG}, "required": ["a"]}),
    "closed objects": distinct(closed({"name": TEXT, "on": FLAG}, "name"), minItems=2),
    "a text that may be left out": distinct(closed({"on": FLAG, "note": TEXT, "off": FLAG}, "on")),
    "a deep text": distinct(
        closed({"on": FLAG, "in": closed({"at": TEXT, "on": FLAG}, "at", "on")}, "in")
    ),
    "numbered objects": distinct(closed({"id": COUNT, "on": FLAG}, "id"), minItems=2),
    "lists": distinct({"type": "array", "items": FLAG}, minItems=2),
    "lists within": distinct(distinct(TEXT), minItems=2),
    "several": {
        "type": "object",
        "properties": {"one": distinct(TEXT), "two": {"type": "array", "items": FLAG}},
        "additionalProperties": distinct({"enum": list("abcdef")}),
    },
    "keys by pattern": {
        "type": "object",
        "patternProperties": {"^u": distinct(COUNT)},
        "additionalProperties": {"type": "array", "items": COUNT},
    },
    "or a text": {"anyOf": [TEXT, distinct(TEXT)]},
    "or other objects": {
        "anyOf": [
            closed({"kind": {"const": "a"}, "list": distinct(TEXT)}, "kind", "list"),
            closed({"kind": {"const": "b"}, "list": TEXT}, "kind", "list"),
        ]
    },
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": closed({"name": TEXT, "inner": distinct({"$ref": "#/$defs/node"})}, "name")
        },
    },
}
REFUSED = {
    "closed objects without a text": distinct(closed({"on": FLAG}, "on")),
    "bounded lists": distinct({"type": "array", "maxItems": 2}),
    "multiples": distinct({"type": "integer", "multipleOf": 3}),
    "addresses": distinct({"type": "string", "format": "email"}),
    "other lists beside it": {
        "anyOf": [distinct({"type": "string", "maxLength": 3}), {"type": "array", "items": FLAG}]
    },
    "more items than values": distinct(
        {"type": "integer", "minimum": 1, "maximum": 9}, minItems=11
    ),
}


def matcher(name: str, **options: Any) -> Matcher:
    made = compiled(GrammarKind.JSON_SCHEMA, SERVED[name], **options)
    assert made.checks
    return STORE.open(made, vocabulary())


def obeys(name: str, text: str) -> bool:
    return Draft202012Validator(SERVED[name]).is_valid(json.loads(text))


def writes(of: Matcher, text: str) -> bool:
    """Whether a text, byte by byte, is a whole one; everything that tells must agree."""
    for byte in text.encode():
        may = byte in allowed(of) and not of.vetoes(byte)
        assert of.count_legal([byte]) == of.accept(byte) == may
        if not may:
            return False
    return of.can_end


# --- oracle ------------------------------------------------------------------------------------


def repeated(value: Any, rng: random.Random) -> Any:
    """A document with items of its lists said again."""
    if isinstance(value, list) and value:
        inner = [repeated(each, rng) for each in value]
        return [*inner, rng.choice(inner)] if rng.random() < 0.5 else inner
    if isinstance(value, dict):
        return {key: repeated(each, rng) for key, each in value.items()}
    return value


@pytest.mark.parametrize("name", SERVED)
def test_no_invalid_document_is_accepted(name):
    rng, written = random.Random(name), route(schema_spec(SERVED[name])).content
    num_invalid = 0
    for _ in range(25):
        value = sample(written, rng)
        for each in (value, repeated(value, rng), mutate(value, rng)):
            text = compact(each)
            if not obeys(name, text):
                num_invalid += 1
                assert not writes(matcher(name), text), text
    assert num_invalid


# Objects that differ only behind the last place where any number of values are possible.
NARROWED = {"closed objects", "a text that may be left out", "a deep text", "numbered objects"}
ALL_OF_FEW = {"all of its values", "few integers"}  # seldom drawn


@pytest.mark.parametrize("name", sorted(SERVED.keys() - NARROWED - ALL_OF_FEW))
def test_valid_documents_are_accepted(name):
    rng, written = random.Random(name), route(schema_spec(SERVED[name])).content
    num_valid = 0
    for _ in range(25):
        text = compact(sample(written, rng))
        if obeys(name, text):
            num_valid += 1
            assert writes(matcher(name), text), text
    assert num_valid


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("closed objects", '[{"name":"a","on":true},{"name":"b","on":true}]'),
        ("closed objects", '[{"name":"a"},{"name":"ab"},{"name":"b"}]'),
        ("a text that may be left out", '[{"on":true},{"on":false},{"on":true,"note":""}]'),
        ("a deep text", '[{"in":{"at":"","on":true}},{"on":true,"in":{"at":"","on":true}}]'),
        ("all of its values", compact(list("hgfedcba"))),
        ("few integers", "[10,8,12,9,11]"),
        ("numbered objects", '[{"id":1},{"id":10},{"id":0,"on":true}]'),
    ],
)
def test_each_that_differs_in_time_is_accepted(name, text):
    assert obeys(name, text)
    assert writes(matcher(name), text)


# --- adversaries -------------------------------------------------------------------------------


def copied(text: bytes, rng: random.Random) -> int | None:
    """What followed the last time that the text stood like this: a model that repeats itself."""
    for size in (12, 6, 4, 3, 2, 1):
        context = text[-size:]
        places = [i for i in range(len(text) - size) if text[i : i + size] == context]
        if len(context) == size and places:
            return text[rng.choice(places) + size]
    return None


def chosen(of: Matcher, text: bytes, rng: random.Random) -> int:
    """A token that the mask allows and nothing vetoes; one that repeats, if any."""
    left = allowed(of)
    closing = [t for t in (END, *b'"}],') if t in left] if len(text) > MAX_BYTES // 3 else []
    wanted = copied(text, rng)
    first = [wanted] if wanted in left and rng.random() < 0.9 else []
    plain = [t for t in left if t < 256 and (t < 128 or rng.random() < 0.1)]
    usual = [t for t in plain if chr(t) in '[]{}",:0123456789abtfn-.']
    for token in [*closing, *first, *rng.sample(usual, len(usual)), *rng.sample(plain, len(plain)),
                  *sorted(left)]:  # fmt: skip
        if not of.vetoes(token):
            return token
    raise AssertionError(f"nothing can follow {text!r}")


@pytest.mark.parametrize("name", SERVED)
def test_who_prefers_repetitions_is_never_stuck_and_always_valid(name):
    for seed in range(12):
        rng, of, text = random.Random(f"{name}{seed}"), matcher(name), b""
        while not of.finished and len(text) < MAX_BYTES:
            token = chosen(of, text, rng)
            assert of.accept(token)
            if token in (END, OTHER_END):
                break
            text += vocabulary().pieces[token]
        if of.can_end or of.finished:
            assert obeys(name, text.decode()), text


def copier(history: list[int]) -> np.ndarray:
    """Prefers what it has said before, then lists and ends."""
    row = np.random.default_rng(len(history)).normal(size=WIDTH).astype(np.float32)
    row[list(b'[",]')] += 4
    row[list(b"ab")] += 5
    row[[END, OTHER_END]] -= 20
    at = copied(bytes(t for t in history if t < 256), random.Random(0))
    if at is not None:
        row[at] += 9
    return row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_chooses_anew_where_its_choice_is_vetoed(temperature):
    asked = [
        request(
            name.replace(" ", "_"),
            compiled(GrammarKind.JSON_SCHEMA, SERVED[name]),
            temperature=temperature,
            max_tokens=60,
            logprobs=1,
            n=2 if temperature else 1,
            seed=1,
        )
        for name in ("strings", "all of its values", "few integers", "closed objects", "integers")
    ]
    engine, strand = make_engine(copier, num_blocks=256)
    for one in asked:
        engine.add(one)
    texts: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], FinishReason | None] = {}
    for event in drain(engine, strand):
        key = (event.request_id, event.index)
        texts.setdefault(key, []).extend(event.token_ids)
        ends[key] = event.finish_reason
    for (name, _), tokens in texts.items():
        of = matcher(name.replace("_", " "))
        assert all(of.accept(token) for token in tokens)
    stopped = [key for key, reason in ends.items() if reason is FinishReason.STOP]
    assert any(name == "all_of_its_values" for name, _ in stopped)
    for key in stopped:
        assert obeys(key[0].replace("_", " "), text_of(texts[key]))
    assert set(ends.values()) <= {FinishReason.STOP, FinishReason.LENGTH}


# --- equality ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("100", "1e2"),
        ("0", "-0.0"),
        ('{"a":1,"b":2}', '{"b":2.0,"a":1}'),
        ("[[1]]", "[[1.00]]"),
        ('"é"', '"\\u00e9"'),
        ("0.1", "0.10000000000000000000001"),  # the same to nearly all who read it
        ("1e23", "100000000000000000000000"),
        ("1e400", "2e400"),  # both infinite, to them
        ("1" + "0" * 5000, "1" + "0" * 5000 + ".0"),
    ],
)
def test_equal_values_are_repetitions_however_written(one, other):
    assert Item.read(one).equals(Item.read(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "true"),
        ("0", "false"),
        ("[1]", "[true]"),
        ('{"a":0}', '{"a":false}'),
        ("9007199254740993", "9007199254740992"),
        ('"1"', "1"),
        ("null", "false"),
        ("[]", "{}"),
        ("1e999999999999999999999", "1"),
    ],
)
def test_different_values_are_none(one, other):
    assert not Item.read(one).equals(Item.read(other))


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_items_that_could_run_out_of_values_are_refused_by_name(name):
    with pytest.raises(UnsupportedSchemaKeyword, match=r"^'uniqueItems' at /.*; ") as caught:
        route(schema_spec(REFUSED[name]))
    assert caught.value.param == "response_format"


def test_lists_of_one_item_need_no_comparison():
    assert not route(schema_spec(distinct(TEXT, maxItems=1))).checks


# --- state -------------------------------------------------------------------------------------


def test_whitespace_between_items_changes_nothing():
    of = matcher("integers", any_whitespace=True)
    for byte in b"[ 1 ,":
        assert of.accept(byte)
    assert of.accept(ord("1"))
    assert of.vetoes(ord(" "))
    assert of.vetoes(ord(","))
    assert not of.vetoes(ord("0"))


def test_a_token_of_many_bytes_is_vetoed_for_what_it_spells():
    of = matcher("strings")
    for byte in b'["a"':
        assert of.accept(byte)
    assert of.accept(ord(","))
    again = vocabulary().pieces.index(b'"a"')
    assert again in allowed(of)
    assert of.vetoes(again)
    assert not of.accept(again)
    assert of.vetoes(ord('"'), drafts=tuple(b'"a'))
    assert not of.vetoes(ord('"'), drafts=tuple(b'"ab'))


def test_drafts_are_cut_in_front_of_a_repetition():
    of = matcher("strings")
    for byte in b'["x",':
        assert of.accept(byte)
    masks = np.zeros((7, vocabulary().num_words), np.int32)
    assert of.count_legal(tuple(b'"x","y')) == 2
    assert of.fill_drafts(tuple(b'"x","y'), masks) == 2
    assert of.num_tokens == 5
    assert of.accept(ord('"'))


def test_going_back_any_way_leads_to_the_same_place():
    rng, checks = random.Random(5), compiled(GrammarKind.JSON_SCHEMA, SERVED["strings"]).checks
    text = compact([f"{i}" for i in range(40)]).encode()
    one, at = Uniqueness(checks), 0
    for _ in range(60):
        step = rng.randrange(-min(at, 150), min(60, len(text) - at) + 1)
        if step < 0:
            one.rollback(-step)
        else:
            assert all(one.accept(bytes([b])) for b in text[at : at + step])
        at += step
        two, other = Uniqueness(checks), one.copy()
        assert two.accept(text[:at])
        for piece in (text[at : at + 1], text[at : at + 4], text[at : at + 9], b""):
            assert not any(each.vetoes(piece) for each in (one, two, other))
        if text[at : at + 1] == b'"' and text[at - 1 : at] == b"," and at > 5:
            assert all(each.vetoes(b'"0"') for each in (one, two, other))


def test_grammars_without_unique_items_veto_nothing():
    made = compiled(GrammarKind.JSON_SCHEMA, {"type": "array", "items": TEXT})
    assert made.checks == b""
    of = STORE.open(made, vocabulary())
    assert not of.can_veto
    assert not of.vetoes(ord("["))


# --- counting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0, 9), (-12, 7), (95, 1203), (-300, -5), (7, 7)])
def test_integers_between_bounds_are_counted_exactly(low, high):
    found = counting.build((counting.integers(low, high),))
    assert found is not None
    assert found.num_left(0) == high - low + 1
    for value in (low, high, low - 1, high + 1, 0):
        assert spelled(found, str(value)) == (low <= value <= high)


def spelled(language: counting.Automaton, text: str) -> bool:
    state = 0
    for char in text:
        state = language.step(state, ord(char))
        if state < 0:
            return False
    return language.accepts(state)


def test_counts_of_a_language_are_those_of_its_strings():
    found = counting.build((regex.search("^(a|b[cd]){1,2}e?$"),))
    assert found is not None
    assert found.num_left(0) == (3 + 9) * 2
    assert found.num_left(0, ((97, 97),)) == (1 + 3) * 2
    lengths = counting.Lengths(1, 2)
    assert lengths.num_left(2) == 1
    assert lengths.num_left(2, ((97, 98),)) == 0
    assert lengths.num_left(1, ((97, 98),)) == 2
