"""Constraints on their way through the router and the compiler, in this process."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.grammars import accepts, compact, vocabulary

from plait.platform.errors import BadRequest, GrammarTooComplex, InvalidGrammar, Unsupported
from plait.structured import backends
from plait.structured import compiler as compiling
from plait.structured.compile_worker import Worker
from plait.structured.compiler import Compiler, compile_route
from plait.structured.frames import Start
from plait.structured.matcher import MatcherStore
from plait.structured.spec import GrammarKind, GrammarSpec


@dataclass(frozen=True)
class HandRoute:
    backend: str
    kind: GrammarKind
    content: Any
    options: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def compiler():
    return Compiler(vocabulary())


def opened(compiler, kind, content, **fields):
    spec = GrammarSpec(kind=kind, content=content, **fields)
    return MatcherStore().open(compiler.compile(spec), vocabulary())


def test_each_kind_goes_from_constraint_to_text(compiler):
    assert accepts(opened(compiler, GrammarKind.JSON_OBJECT, None), '{"a":[1,null]}')
    assert accepts(opened(compiler, GrammarKind.REGEX, "[a-c]+x?"), "abcx")
    assert accepts(opened(compiler, GrammarKind.CHOICE, ["yes", "no"]), "no")
    assert accepts(opened(compiler, GrammarKind.GRAMMAR, 'root ::= "a" | "b"'), "b")
    assert accepts(opened(compiler, GrammarKind.GRAMMAR, 'start: "a" | "b"'), "b")


@pytest.mark.parametrize("choice", ['"', "\\", "a\nb\tc", "\x01\x7f", "日本👋🏽", "$^.*[x]", "'"])
def test_choices_are_taken_literally(compiler, choice):
    matcher = opened(compiler, GrammarKind.CHOICE, [choice, "other"])
    assert accepts(matcher, choice)
    assert matcher.finished


def test_the_key_is_of_content_backend_options_and_vocabulary():
    base = HandRoute("llguidance", GrammarKind.JSON_SCHEMA, {"type": "null"})
    others = [
        replace(base, backend="xgrammar"),
        replace(base, content={"type": "boolean"}),
        replace(base, options={"item_separator": ", "}),
    ]
    made = [compile_route(route, vocabulary()) for route in (base, *others)]
    wider = vocabulary().extended({vocabulary().width: b"x"})
    keys = [each.key for each in [*made, compile_route(base, wider)]]
    assert len(set(keys)) == len(keys)
    assert compile_route(base, vocabulary()) == made[0]


def test_a_result_too_large_for_the_engine_is_refused(compiler, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_PAYLOAD_BYTES", 1000)
    route = HandRoute("xgrammar", GrammarKind.JSON_SCHEMA, {"enum": ["abc" * 400, "b"]})
    with pytest.raises(GrammarTooComplex, match=r"1,000 are the limit"):
        compiler.compile_route(route)


def test_errors_name_the_field(compiler):
    for kind, content in [
        (GrammarKind.GRAMMAR, "root ::= ["),
        (GrammarKind.CHOICE, ["\ud800"]),
        (GrammarKind.REGEX, "("),
        (GrammarKind.JSON_SCHEMA, {"type": "nonsense"}),
    ]:
        with pytest.raises(BadRequest) as caught:
            opened(compiler, kind, content, param="structured_outputs")
        assert caught.value.param == "structured_outputs"


def test_leniency_finds_no_way_in(compiler):
    sly = 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'
    with pytest.raises(InvalidGrammar, match="x-guidance"):
        compiler.compile_route(HandRoute("llguidance", GrammarKind.GRAMMAR, sly))


def test_the_common_fragments_are_a_schema_that_is_served(compiler):
    compiler.warm()
    matcher = opened(compiler, GrammarKind.JSON_SCHEMA, compiling.COMMON)
    assert accepts(matcher, compact({"text": "é", "count": 1}))


def test_a_process_that_only_compiles_loads_no_torch():
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from support.grammars import vocabulary\n"
        "from plait.structured.compiler import Compiler\n"
        "Compiler(vocabulary()).warm()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("installed", "served"), [("1.9.1", True), ("1.10.0", True), ("1.7.6", False), ("2.0.0", False)]
)
def test_versions_of_llguidance_that_are_not_tested_are_refused_by_name(
    monkeypatch, installed, served
):
    monkeypatch.setattr(backends, "version", lambda _: installed)
    if served:
        backends.check_version("llguidance")
    else:
        with pytest.raises(Unsupported, match=f"llguidance {installed}"):
            backends.check_version("llguidance")


@pytest.mark.parametrize(
    "content",
    [
        "root ::= root",
        'root ::= "a" root',
        'root ::= "x" | "a" loop\nloop ::= "b" loop',
        'root ::= "x" | "a" [^\\x00-\\U0010ffff]',
        "start: start",
    ],
)
def test_a_grammar_with_a_part_that_never_ends_is_refused(compiler, content):
    with pytest.raises(InvalidGrammar, match="cannot be compiled"):
        opened(compiler, GrammarKind.GRAMMAR, content)


def test_recursion_that_ends_is_served(compiler):
    text = 'root ::= list | "" \nlist ::= "[" (root ("," root){0,3})? "]"'
    assert accepts(opened(compiler, GrammarKind.GRAMMAR, text), "[[],[[]]]")


def test_forced_text_without_bound_is_refused(compiler):
    doubled = 'root ::= "x" | r0 | "y"\n'
    doubled += "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"\n'
    with pytest.raises(GrammarTooComplex, match="shortest text"):
        opened(compiler, GrammarKind.GRAMMAR, doubled)


@pytest.mark.parametrize("key", ["x-guidance", "x\\u002dguidance", "\\u0078-guidanc\\u0065"])
def test_no_spelling_of_options_in_a_grammar_switches_enforcement_off(compiler, key):
    text = f'start: %json {{"type": "object", "{key}": {{"lenient": true}}, "not": {{}}}}'
    with pytest.raises(InvalidGrammar, match="x-guidance"):
        opened(compiler, GrammarKind.GRAMMAR, text)


def test_megabytes_of_forced_text_are_refused_or_asked_for_once(compiler):
    many = {"type": "array", "items": {"const": "x" * 1000}, "minItems": 200}
    with pytest.raises(GrammarTooComplex, match="forces a text"):
        opened(compiler, GrammarKind.JSON_SCHEMA, many)
    later = {"anyOf": [{"type": "null"}, {**many, "prefixItems": [{"type": "boolean"}]}]}
    one = opened(compiler, GrammarKind.JSON_SCHEMA, later)
    assert one.forced_tokens(4) == []
    for token in b"[true,":
        assert one.accept(token)
    assert one.forced_tokens(4)
    assert one.forced_tokens(4) == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (GrammarKind.JSON_SCHEMA, {"const": "\ud800"}),
        (GrammarKind.REGEX, "\ud800"),
        (GrammarKind.CHOICE, ["\ud800"]),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_name(compiler, kind, content):
    with pytest.raises(BadRequest, match="half a surrogate pair") as raised:
        compiler.compile(GrammarSpec(kind=kind, content=content, param="there"))
    assert raised.value.param == "there"


def test_a_worker_collects_what_jobs_left_once_it_is_much():
    class Left:
        def __init__(self) -> None:
            self.itself = self

    link, theirs = socket.socketpair()
    with link, theirs:
        worker = Worker(link, Start(memory_bytes=1 << 30, processor_limit_s=2.0, wall_limit_s=10.0))
        gc.collect()
        gc.disable()
        try:
            left = weakref.ref(Left())
            worker._tidy()
            assert left() is not None
            much = [[] for _ in range(20_000)]
            worker._tidy()
            assert left() is None
            assert much
        finally:
            gc.enable()
