"""Grammars that compile and would then keep others waiting are refused, by what a clock says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.grammars import backend, vocabulary

from plait.platform.errors import GrammarTooComplex
from plait.structured.backends import Grammar, Parser
from plait.structured.compiler import Compiler
from plait.structured.patience import ALLOWED_S, MOST_S, Patience
from plait.structured.spec import CompiledGrammar, GrammarKind, GrammarSpec
from plait.structured.trial import NUM_TOKENS, Trial, TrialLimits

LIMITS = TrialLimits()
UNIQUE = {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True}
SPECS = {
    "xgrammar": GrammarSpec(kind=GrammarKind.REGEX, content="[ab]{2,60}"),
    "llguidance": GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=UNIQUE),
}


def compiled(name: str) -> CompiledGrammar:
    grammar = Compiler(vocabulary()).compile(SPECS[name])
    assert grammar.backend == name
    return grammar


class Clock:
    """Each reading is later than the last by the next of some steps, then by `rest`."""

    def __init__(self, *steps: float, rest: float = 0.0) -> None:
        self.now = 0.0
        self.readings = 0
        self._steps: Iterator[float] = iter(steps)
        self._rest = rest

    def __call__(self) -> float:
        self.readings += 1
        self.now += next(self._steps, self._rest)
        return self.now


class Recording:
    """A backend whose parsers tell what was accepted."""

    def __init__(self, name: str) -> None:
        self._backend = backend(name)
        self.opens_by_compiling = self._backend.opens_by_compiling
        self.accepted: list[int] = []

    def load(self, payload: bytes) -> Grammar:
        grammar, accepted = self._backend.load(payload), self.accepted

        def told(parser: Parser) -> Parser:
            accept, copy = parser.accept, parser.copy

            class Told(type(parser)):  # type: ignore[misc]
                def accept(self, token: int) -> bool:
                    accepted.append(token)
                    return accept(token)

                def copy(self) -> Parser:
                    return told(copy())

            parser.__class__ = Told
            return parser

        class Parsers:
            def parser(self) -> Parser:
                return told(grammar.parser())

        return Parsers()


@pytest.mark.parametrize("name", SPECS)
def test_a_quick_grammar_passes_and_its_walks_are_the_same_each_time(name: str) -> None:
    grammar, texts = compiled(name), []
    for _ in range(2):
        recording = Recording(name)
        Trial(vocabulary=vocabulary(), clock=Clock()).check(grammar, recording)
        texts.append(recording.accepted)
    assert texts[0] == texts[1]
    assert NUM_TOKENS < len(texts[0]) <= 5 * NUM_TOKENS
    other = Recording(name)
    Trial(vocabulary=vocabulary(), clock=Clock()).check(replace(grammar, key="f" * 64), other)
    assert other.accepted != texts[0]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("slow", "what"),
    [
        (LIMITS.open_s * 1.1, "opening it takes 550 ms"),
        (LIMITS.token_s * 0.6, "one token takes 24 ms"),  # two stretches of it are counted
        (LIMITS.mean_s * 1.1, "a token on average takes"),
    ],
    ids=["open", "token", "mean"],
)
def test_each_limit_is_named_where_two_tries_are_beyond_it(
    name: str, slow: float, what: str
) -> None:
    trial = Trial(vocabulary=vocabulary(), clock=Clock(rest=slow))
    with pytest.raises(GrammarTooComplex) as raised:
        trial.check(compiled(name), backend(name))
    assert what in raised.value.message
    assert "Simplify it" in raised.value.message


def test_one_hiccup_refuses_nothing() -> None:
    hiccup = Clock(0, 0, 0, 1.0)
    Trial(vocabulary=vocabulary(), clock=hiccup).check(compiled("xgrammar"), backend("xgrammar"))
    assert hiccup.now == 1.0
    always = Clock(0, 0, 0, rest=1.0)
    trial = Trial(vocabulary=vocabulary(), clock=always)
    with pytest.raises(GrammarTooComplex):
        trial.check(compiled("xgrammar"), backend("xgrammar"))


def test_what_walks_choose_between_is_not_counted() -> None:
    """A step of a walk reads the clock around the engine's work, not around its own."""
    clock = Clock()
    Trial(vocabulary=vocabulary(), clock=clock).check(compiled("xgrammar"), backend("xgrammar"))
    assert clock.readings % 2 == 0


@pytest.mark.parametrize(
    "text",
    ['start: b\nb: "b" b\n', 'start: b\nb: "b" b | "c" b\n', 'start: "a" | "b" b\nb: "b" b\n'],
)
def test_a_lark_grammar_without_an_end_is_refused(text: str) -> None:
    spec = GrammarSpec(kind=GrammarKind.GRAMMAR, content=text, param="grammar")
    with pytest.raises(Exception, match="end") as raised:
        Compiler(vocabulary()).compile(spec)
    assert raised.value.code == "invalid_grammar"
    assert raised.value.param == "grammar"


def test_a_compiler_with_a_clock_tries_what_it_compiles() -> None:
    spec = replace(SPECS["xgrammar"], param="regex")
    assert Compiler(vocabulary(), clock=Clock()).compile(spec) == compiled("xgrammar")
    with pytest.raises(GrammarTooComplex) as raised:
        Compiler(vocabulary(), clock=Clock(rest=1.0)).compile(spec)
    assert raised.value.param == "regex"


def test_patience_ends_with_what_is_beyond_the_allowance() -> None:
    patience = Patience()
    for _ in range(1000):
        patience.token()
        patience.take(ALLOWED_S)
    patience.take(MOST_S * 0.9)
    for _ in range(1000):
        patience.token()  # what was saved is not kept for later
    patience.take(MOST_S * 0.99)
    with pytest.raises(GrammarTooComplex, match="takes too long"):
        patience.take(MOST_S * 0.02)
