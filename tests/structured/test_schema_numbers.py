"""Numbers beyond what backends count exactly: as they are, or refused."""

import json
import random
from decimal import Decimal

import jsonschema
import pytest
from support.schemas import acceptor, closed, schema_spec

from plait.platform.errors import UnsupportedSchemaKeyword
from plait.structured.router import route


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("power", [53, 62, 63, 64, 100])
def test_whole_numbers_beyond_what_backends_count_are_exact_or_refused(power, sign):
    generator = random.Random(power)
    for off in (*range(-3, 4), *(generator.randint(-5000, 5000) for _ in range(30))):
        edges = [sign * 2**power + off, sign * 2**power + off + generator.choice([0, 5, 1 << 40])]
        for bounds in (edges, [edges[0], None], [None, edges[1]]):
            named = zip(("minimum", "maximum"), bounds, strict=True)
            schema = {"type": "integer", **{k: v for k, v in named if v is not None}}
            try:
                grammar = acceptor(route(schema_spec(schema)))
            except UnsupportedSchemaKeyword:
                continue
            near = (edge + i * step for edge in edges for i in (-1, 0, 1) for step in (1, 2, 1024))
            for number in [*near, 0, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1]:
                if grammar.accepts(str(number)):
                    jsonschema.validate(number, schema)


@pytest.mark.parametrize("power", [53, 62, 63, 64, 70, 100])
@pytest.mark.parametrize("beside", [{"type": "string", "pattern": "^x$"}, {"maxLength": 2}])
def test_listed_numbers_beyond_53_bits_come_out_as_they_are_or_are_refused(power, beside):
    for number in (2**power - 1, 2**power, -(2**power) - 1, 10 ** (power // 3), float(2**power)):
        schema = {"anyOf": [{"const": number}, {"const": {"a": [number]}}, beside]}
        try:
            grammar = acceptor(route(schema_spec(schema)))
        except UnsupportedSchemaKeyword:
            continue
        plain = int(number)
        spelled = {plain, int(float(plain)), int(Decimal(repr(float(plain))))}
        for text in [str(each) for each in spelled] + [f'{{"a":[{each}]}}' for each in spelled]:
            if grammar.accepts(text):
                jsonschema.validate(json.loads(text), schema)


def test_identifiers_of_64_bits_can_be_listed():
    listed = [1145141919810364364, 9007199254740993, 2**63 - 1]
    grammar = acceptor(route(schema_spec(closed({"id": {"enum": listed}}))))
    assert [n for n in range(2**53, 2**53 + 4) if grammar.accepts(f'{{"id":{n}}}')] == [2**53 + 1]
    assert all(grammar.accepts(f'{{"id":{number}}}') for number in listed)


def test_bounds_of_64_bit_types_are_served():
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (0, 10**30)):
        schema = {"type": "integer", "minimum": low, "maximum": high}
        assert acceptor(route(schema_spec(schema))).accepts(str(2**53 + 1))
