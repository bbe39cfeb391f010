"""Random schemas against random documents, with jsonschema as the judge."""

import copy
import itertools
import json
import random
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.schemas import acceptor, compact, mutate, sample, schema_spec

from plait.platform.errors import BadRequest, InvalidSchema
from plait.structured.router import route
from plait.structured.schema import automata, derive, regex
from plait.structured.schema.normalise import normalise
from plait.structured.spec import GrammarKind, GrammarSpec

NAMES = st.sampled_from(["a", "b", "ab", "x"])
PATTERNS = st.sampled_from(["^a", "b$", "^[ab]+$", "^.{2,3}$", "a|^x$", "^(?:ab?)*$", "\\d"])
VALUES = st.sampled_from([None, True, False, 0, 1, 2, 1.5, "a", "ab", "x", [], [1], {}, {"a": 1}])
SMALL = st.integers(0, 3)


def either(**keywords):
    return st.fixed_dictionaries({}, optional=keywords)


def leaves():
    number = either(
        type=st.sampled_from(["integer", "number"]),
        minimum=SMALL,
        exclusiveMaximum=st.sampled_from([2, 2.5, 4]),
        multipleOf=st.sampled_from([1, 2, 0.5]),
    )
    string = either(type=st.just("string"), minLength=SMALL, maxLength=SMALL, pattern=PATTERNS)
    listed = st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4))
    kinds = st.sampled_from(["null", "boolean", "string", "integer", "number", "array", "object"])
    typed = st.builds(lambda kind: {"type": kind}, kinds | st.lists(kinds, min_size=1, unique=True))
    const = st.builds(lambda value: {"const": value}, VALUES)
    return st.one_of(number, string, listed, typed, const, st.booleans())


def grown(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=3)
    objects = either(
        type=st.just("object"),
        properties=named,
        required=st.lists(NAMES, max_size=2, unique=True),
        additionalProperties=inner,
        patternProperties=st.dictionaries(
            st.sampled_from(["^a", "^[bx]", "b$"]), inner, max_size=2
        ),
        propertyNames=st.one_of(
            st.builds(lambda p: {"pattern": p}, PATTERNS), st.just({"maxLength": 1})
        ),
        minProperties=SMALL,
        maxProperties=SMALL,
        dependentRequired=st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=2),
        dependentSchemas=st.dictionaries(NAMES, inner, max_size=1),
        unevaluatedProperties=inner,
    )
    lists = either(
        type=st.just("array"),
        prefixItems=several,
        items=inner,
        minItems=SMALL,
        maxItems=SMALL,
        contains=inner,
        maxContains=SMALL,
        uniqueItems=st.booleans(),
        unevaluatedItems=inner,
    )
    applied = either(
        allOf=several,
        anyOf=several,
        oneOf=several,
        **{"not": inner, "if": inner, "then": inner, "else": inner},
    )
    both = st.builds(lambda one, other: {**one, **other}, st.one_of(objects, lists), applied)
    return st.one_of(objects, lists, applied, both, both)


SCHEMAS = st.recursive(leaves(), grown, max_leaves=8)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def with_recursion(schema, where):
    """The schema under a definition that refers to itself."""
    if not isinstance(schema, dict):
        return schema
    node = {"anyOf": [schema, {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}]}
    return {"$defs": {"n": node}, "$ref": "#/$defs/n"} if where else schema


def documents(schema, seed):
    """Documents near the schema and far from it."""
    rng = random.Random(seed)
    for start in (schema, schema, True):
        value = sample(copy.deepcopy(start), rng)
        for _ in range(4):
            yield value
            value = mutate(value, rng)


def in_python(schema):
    """A written schema with its patterns as Python reads them."""

    def rewritten(pattern):
        return f"^(?:{regex.render(regex.fullmatch(pattern), python=True)})\\Z"

    if isinstance(schema, list):
        return [in_python(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {k: v if k == "enum" else in_python(v) for k, v in schema.items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = rewritten(found["pattern"])
    if "patternProperties" in found:
        inner = found["patternProperties"].items()
        found["patternProperties"] = {rewritten(pattern): each for pattern, each in inner}
    return found


def shuffles(value, rng):
    if isinstance(value, list):
        return [shuffles(each, rng) for each in value]
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        return {key: shuffles(each, rng) for key, each in items}
    return value


def respelled(value, rng):
    """The value with some of its whole numbers as 1.0."""
    if isinstance(value, list):
        return [respelled(each, rng) for each in value]
    if isinstance(value, dict):
        return {key: respelled(each, rng) for key, each in value.items()}
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and rng.random() < 0.5 else value


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(SCHEMAS, st.booleans(), st.integers(0, 1000), st.booleans())
def test_a_routed_grammar_accepts_only_what_the_judge_accepts(schema, recursive, seed, any_form):
    schema = with_recursion(schema, recursive)
    judge = jsonschema.Draft202012Validator(schema)
    spec = schema_spec(schema, options={"any_form": any_form})
    try:
        found = route(spec)
    except BadRequest as error:
        if isinstance(error, InvalidSchema) and "no document" in error.message:
            assert not any(judge.is_valid(d) for d in documents(True, seed)), schema
        return
    grammar, rng = acceptor(found), random.Random(seed)
    for document in documents(normalise(schema, spec, whole=True).schema, seed):
        shuffled = shuffles(document, rng)
        for each in (document, shuffled, respelled(document, rng), respelled(shuffled, rng)):
            if grammar.accepts(compact(each)):
                assert judge.is_valid(each), (schema, each, found)


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(SCHEMAS, st.booleans(), st.integers(0, 1000), st.booleans())
def test_what_is_allowed_in_one_form_is_allowed_in_any(schema, recursive, seed, any_whitespace):
    schema = with_recursion(schema, recursive)
    options = {"any_whitespace": any_whitespace}
    try:
        usual = route(schema_spec(schema, options=options))
        found = route(schema_spec(schema, options={**options, "any_form": True}))
    except BadRequest:
        return
    one, every, rng = acceptor(usual), acceptor(found), random.Random(seed)
    schema = normalise(schema, schema_spec(schema), whole=True).schema
    counted = "minProperties" in str(schema) or "maxProperties" in str(schema)
    write = json.dumps if any_whitespace else compact
    for document in documents(schema, seed):
        if not one.accepts(compact(document)):
            continue
        others = [document]
        if found.any_form:
            others.append(respelled(document, rng))
            others += [] if counted else [shuffles(document, rng)]
        for each in others:
            assert every.accepts(write(each)), (schema, each)


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(SCHEMAS, st.booleans(), st.integers(0, 1000))
def test_normalising_changes_no_meaning(schema, recursive, seed):
    schema = with_recursion(schema, recursive)
    judge = jsonschema.Draft202012Validator(schema)
    try:
        found = normalise(schema, schema_spec(schema))
    except BadRequest:
        return
    if found.refusals:
        return
    again = jsonschema.Draft202012Validator(in_python(found.schema))
    for document in documents(found.schema, seed):
        assert judge.is_valid(document) == again.is_valid(document), (document, found.schema)


TEXTS = st.text(alphabet='abx1\n"é', max_size=6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PATTERNS | st.sampled_from(["[^a]", ".", "\\w{2}", "^(a|b)*a(a|b)$", "(^a|b)x"]), TEXTS)
def test_languages_and_their_complements_are_pythons(pattern, text):
    node = regex.search(pattern)
    expected = re.search(pattern.replace("$", "\\Z"), text, re.ASCII) is not None
    assert derive.matches(node, text) == expected
    other = automata.complement(node)
    assert other is not None
    assert derive.matches(other, text) == (not expected)
    again = regex.fullmatch(regex.anchored(node))
    assert derive.matches(again, text) == expected
    assert re.fullmatch(regex.render(node, python=True), text) is None or expected


PIECES = ["a", "b", "[^a]", "[ab]", "1", " ", "a?", "b*", ".*", "(?:ab)?", "^", "$", r"\b"]
LOOKS = ["(?=a)", "(?!b)", "(?!ab)", "(?=.*a)", "(?!.*11)", "(?<=a)", "(?<!ab)", "(?!a$)", r"\b"]
PIECE = st.sampled_from(PIECES) | st.sampled_from(LOOKS)
SEQUENCE = st.lists(PIECE, min_size=1, max_size=4).map("".join)
OPTIONS = st.builds(
    lambda one, other, end: f"(?:{one}|{other}){end}",
    SEQUENCE,
    SEQUENCE,
    st.sampled_from(["", "?", "{1,2}"]),
)
TEMPERED = st.builds("^(?:(?!{})[ab1 ])*$".format, st.sampled_from(["ab", "b", "1a", " $"]))
LOOKING = st.lists(SEQUENCE | OPTIONS, min_size=1, max_size=3).map("".join) | TEMPERED


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(LOOKING, st.lists(st.text(alphabet="aab1 ", max_size=6), min_size=20, max_size=20))
def test_what_looks_around_is_pythons_once_it_is_taken_out(pattern, texts):
    try:
        node = regex.search(pattern)
    except regex.RegexError:
        return
    expected = re.compile(pattern.replace("$", "\\Z"), re.ASCII)
    for text in texts:
        assert derive.matches(node, text) == (expected.search(text) is not None), text


def nodes():
    letters = st.sampled_from([((97, 97),), ((98, 98),), ((97, 98),), ((99, 99),)])
    bounds = [(0, 1), (0, None), (1, None), (0, 2), (1, 2), (2, None), (2, 2), (2, 3), (0, 3)]

    def grown(inner):
        several = st.lists(inner, min_size=2, max_size=3)
        repeated = st.builds(lambda n, b: regex.repeat(n, *b), inner, st.sampled_from(bounds))
        return st.one_of(several.map(regex.seq), several.map(regex.alt), repeated)

    return st.recursive(letters.map(regex.Chars), grown, max_leaves=8)


ABC = ["".join(each) for n in range(6) for each in itertools.product("abc", repeat=n)]


@settings(max_examples=600, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(nodes(), st.integers(0, 1000))
@example(regex.fullmatch("a{1,2}|a"), 0)
@example(regex.fullmatch("(a+b)?"), 0)
@example(regex.fullmatch("a(b+c)?c"), 0)
def test_patterns_and_regexes_of_either_backend_are_pythons(node, seed):
    expected = re.compile(regex.render(node, python=True))
    pattern = regex.anchored(node)
    ways = [(acceptor(route(schema_spec({"type": "string", "pattern": pattern}))), compact)]
    plain = GrammarSpec(kind=GrammarKind.REGEX, content=regex.render(node))
    ways += [(acceptor(route(plain)), str)] if node != regex.EMPTY else []
    for text in [*random.Random(seed).sample(ABC, 40), "", "a", "aaa", "acc"]:
        for grammar, written in ways:
            found = grammar.accepts(written(text))
            assert found == (expected.fullmatch(text) is not None), (pattern, text)


@given(st.sets(TEXTS, max_size=4), TEXTS)
@settings(deadline=None, derandomize=True)
def test_strings_can_be_left_out(texts, text):
    assert derive.matches(derive.without(texts), text) == (text not in texts)


@pytest.mark.parametrize("pattern", ["(a+)+$", "^(a|a)*$", "^(a*)*b", "(x+x+)+y"])
def test_matching_never_backtracks(pattern):
    assert not derive.matches(regex.search("^(?:" + pattern.strip("^$") + ")$"), "a" * 2000 + "!")
