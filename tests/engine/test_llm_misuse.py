"""The offline API used as it should not be, and from several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plait import LLM, BadRequest, FinishReason, InvalidParameter, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(checkpoint("llama")), kv_cache_bytes=8 << 20, num_threads=1) as made:
        yield made


def test_closing_ends_what_runs_as_aborted(llm: LLM) -> None:
    streams = [llm.stream("Hello", LONG) for _ in range(2)]
    for stream in streams:
        next(stream)
    llm.close()
    for stream in streams:
        assert [delta.finish_reason for delta in stream][-1] is FinishReason.ABORT
    assert llm.stats.kv_usage == 0


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate("a", GREEDY),
        lambda llm: llm.chat([{"role": "user", "content": "a"}], GREEDY),
        lambda llm: list(llm.stream("a", GREEDY)),
        lambda llm: list(llm.stream_chat([{"role": "user", "content": "a"}], GREEDY)),
        lambda llm: llm.encode_chat([{"role": "user", "content": "a"}]),
        lambda llm: llm.load_adapter("a", "nowhere"),
        lambda llm: llm.unload_adapter("a"),
    ],
)
def test_a_closed_one_says_that_it_is(llm: LLM, ask: Callable[[LLM], Any]) -> None:
    llm.close()
    with pytest.raises(BadRequest, match="closed"):
        ask(llm)
    llm.close()


def test_threads_get_what_they_would_get_alone(llm: LLM) -> None:
    prompts = [[5 + i, 6, 7] for i in range(24)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]

    def ask(number: int) -> list[int]:
        if number % 2:
            return llm.generate(prompts[number], GREEDY)[0].outputs[0].token_ids
        return [t for delta in llm.stream(prompts[number], GREEDY) for t in delta.token_ids]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(24))) == alone
    llm._engine.scheduler.check_integrity()


def test_text_that_is_no_unicode_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(BadRequest, match=r"\\udcff, half of a surrogate pair, at character 1"):
        llm.generate("a\udcff", GREEDY)
    with pytest.raises(BadRequest, match="surrogate"):
        llm.chat([{"role": "user", "content": "\ud800"}], GREEDY)
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 12


def test_a_penalty_that_would_leave_no_finite_logits_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1e-300)
