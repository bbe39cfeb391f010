"""A grammar that turns out to be too dear ends its own requests; nobody else notices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.constrained import answers, drain, drawn, grammars, make_engine, request

from plait.platform.core import CompiledGrammar, Event, FinishReason
from plait.structured.masks import MaskFiller
from plait.structured.matcher import Matcher
from plait.structured.patience import MOST_S


class Work:
    """A clock that only the work of one grammar's matchers moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, seconds: float) -> None:
        self.now = 0.0
        self.slow: list[Matcher] = []
        real = getattr(Matcher, method)

        def slowly(matcher: Matcher, *args: Any) -> Any:
            self.now += seconds * any(matcher is each for each in self.slow)
            return real(matcher, *args)

        monkeypatch.setattr(Matcher, method, slowly)

    def __call__(self) -> float:
        return self.now


def ended(events: Sequence[Event], name: str) -> list[Event]:
    return [e for e in events if e.request_id.startswith(name) and e.finish_reason]


@pytest.mark.parametrize("method", ["fill_drafts", "accept"])
def test_only_the_requests_of_a_grammar_that_takes_too_long_end(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dear: CompiledGrammar = grammars()["schema"]
    asked = [one for one in drawn(3, 12) if one.grammar is not dear]
    alone, strand = make_engine()
    for one in asked:
        alone.add(one)
    reference = answers(drain(alone, strand))

    work = Work(monkeypatch, method, MOST_S * 0.4)
    engine, strand = make_engine()
    strand._clock, strand._filler = work, MaskFiller(work)
    engine.add(request("dear", dear, n=2))
    for one in asked:
        engine.add(one)
    events: list[Event] = []
    while engine.has_unfinished:
        events += engine.step()
        engine.scheduler.check_integrity()
        work.slow = [h.matcher for h in strand._held.values() if h.sequence.request.grammar is dear]
    assert answers(e for e in events if not e.request_id.startswith("dear")) == reference
    ends = ended(events, "dear")
    assert len(ends) == 2
    for end in ends:
        assert end.finish_reason is FinishReason.ERROR
        assert end.error is not None
        assert end.error[0] == "grammar_too_complex"
    # It is remembered: nobody waits for it a second time.
    steps = engine.stats.num_steps
    engine.add(request("dear again", dear))
    (end,) = ended(drain(engine, strand), "dear again")
    assert end.error is not None
    assert end.error[0] == "grammar_too_complex"
    assert engine.stats.num_steps - steps <= 1
    assert engine.stats.grammar_faults == 0  # none of ours


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_bound_of_the_library_is_the_grammars_fault_and_no_internal_error(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plait.structured.backends import ParserFault
    from plait.structured.backends.llguidance import LLGuidanceParser

    def gives_up(*_: Any) -> Any:
        raise ParserFault("lexer error: too many expressions constructed")

    engine, strand = make_engine()
    engine.add(request("dear", grammars()["bounded"]))
    engine.add(request("free", max_tokens=5))
    monkeypatch.setattr(LLGuidanceParser, method, gives_up)
    events = drain(engine, strand)
    (end,) = ended(events, "dear")
    assert end.error is not None
    assert end.error[0] == "grammar_too_complex"
    assert engine.stats.grammar_faults == 0
    assert ended(events, "free")[0].error is None
