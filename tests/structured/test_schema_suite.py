"""The official JSON Schema Test Suite, through masks: nothing invalid, and most is served."""

import itertools
import json
from functools import lru_cache
from pathlib import Path

import pytest
from support.schemas import acceptor, compact, schema_spec

from plait.platform.errors import BadRequest, InvalidSchema, UnsupportedSchemaKeyword
from plait.structured.router import route

# As the suite stands, and as strict requests and tools are taken.
WAYS = [{}, {"any_form": False, "assert_formats": True}]
SUITE = Path(__file__).parent / "data" / "json-schema-test-suite-2020-12.json"


@lru_cache(maxsize=2)
def run(narrow=False):
    """The suite's groups as (group, refusal or None, [(test, accepted)])."""
    found = []
    for group in json.loads(SUITE.read_text("utf-8")):
        try:
            grammar = acceptor(route(schema_spec(group["schema"], options=WAYS[narrow])))
        except BadRequest as error:
            found.append((group, error, []))
            continue
        results = [(test, grammar.accepts(compact(test[0]))) for test in group["tests"]]
        found.append((group, None, results))
    return found


def place(group) -> str:
    return f"{group['file']} {group['number']}"


def results(narrow=False):
    return [(group, *test, ok) for group, _, tests in run(narrow) for test, ok in tests]


@pytest.mark.parametrize("narrow", [False, True])
def test_no_invalid_document_of_the_suite_is_accepted(narrow):
    wrong = [
        (place(group), value)
        for group, value, valid, accepted in results(narrow)
        if accepted and not valid
    ]
    assert wrong == []
    assert sum(not valid for _, _, valid, _ in results(narrow)) > 420


def test_most_of_the_suite_is_served():
    served = sum(refusal is None for _, refusal, _ in run())
    assert served / len(run()) > 0.86


def test_of_the_valid_documents_one_in_hundreds_is_rejected():
    valid = [(place(group), accepted) for group, _, valid, accepted in results() if valid]
    rejected = [where for where, accepted in valid if not accepted]
    assert rejected == ["vocabulary 1"]  # its dialect is a metaschema of its own
    assert len(rejected) / len(valid) < 0.005
    assert len(valid) > 680


def test_each_refusal_names_its_keyword_and_place():
    for group, refusal, _ in run():
        if isinstance(refusal, UnsupportedSchemaKeyword):
            assert refusal.message.startswith("'"), refusal.message
            assert " at /" in refusal.message, refusal.message
            assert "; " in refusal.message, refusal.message
        elif refusal:
            assert isinstance(refusal, InvalidSchema), (place(group), refusal)


def test_nothing_that_can_be_valid_is_called_contradictory():
    for group, refusal, _ in run():
        if isinstance(refusal, InvalidSchema):
            assert not any(valid for _, valid in group["tests"]), place(group)


def spelled_otherwise(value) -> bool:
    """1.0 for an integer."""
    if isinstance(value, list | dict):
        return any(map(spelled_otherwise, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


def test_the_narrow_way_rejects_other_spellings_other_orders_and_wrong_formats_only():
    left = [
        (place(group), value)
        for group, value, valid, accepted in results(narrow=True)
        if valid
        and not accepted
        and group["file"] not in {"format", "vocabulary"}
        and not spelled_otherwise(value)
        and not (isinstance(value, dict) and any_order_is_accepted(group, value))
    ]
    assert left == []


def any_order_is_accepted(group, value) -> bool:
    grammar = acceptor(route(schema_spec(group["schema"], options=WAYS[True])))
    orders = itertools.permutations(value.items())
    return any(grammar.accepts(compact(dict(each))) for each in itertools.islice(orders, 30))


@pytest.mark.parametrize("keyword", ["uniqueItems", "$dynamicRef"])
def test_what_no_backend_enforces_is_refused_by_name(keyword):
    names = [refusal.message for _, refusal, _ in run() if refusal]
    assert any(message.startswith(f"'{keyword}'") for message in names)
