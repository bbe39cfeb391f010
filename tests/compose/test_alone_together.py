"""Contract 1 on real models: a request gives the same tokens alone and in any company."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from plait import LLM, SamplingParams
from plait.platform.config import Options
from plait.platform.core import Event, Request
from plait.platform.intake import Intake
from plait.platform.start import Started, start_engine

FAMILIES = ("llama", "gemma3", "qwen3_moe")
COUNT = 24
MAX_MODEL_LEN = 256


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Two dozen requests of every kind, half of them with a common beginning."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 300) for _ in range(90)]
    drawn = []
    for i in range(COUNT):
        prompt = common[: rng.randrange(90)] if rng.random() < 0.5 else []
        prompt += [rng.randrange(3, 300) for _ in range(rng.randrange(1, 60))]
        kind = i % 6
        drawn.append(
            (
                prompt,
                SamplingParams(
                    max_tokens=rng.randrange(1, 24),
                    temperature=0.0 if kind < 3 else 0.2 * kind,
                    seed=i,
                    n=3 if kind == 5 else 1,
                    top_p=0.9 if kind == 3 else 1.0,
                    top_k=20 if kind == 4 else 0,
                    repetition_penalty=1.3 if kind == 1 else 1.0,
                    presence_penalty=0.7 if kind == 4 else 0.0,
                    frequency_penalty=0.3 if kind == 2 else 0.0,
                    stop=("e", " t") if kind in (0, 3) else (),
                    min_tokens=1 if kind == 2 else 0,
                    logprobs=2 if kind == 1 else None,
                ),
            )
        )
    return drawn


Answer = tuple[tuple[int, ...], str, str]


def answers(events: list[Event]) -> dict[tuple[str, int], Answer]:
    gathered: dict[tuple[str, int], Answer] = {}
    for event in events:
        ids, text, _ = gathered.get((event.request_id, event.index), ((), "", ""))
        gathered[event.request_id, event.index] = (
            ids + event.token_ids,
            text + event.text,
            f"{event.finish_reason}:{event.stop_reason}",
        )
    return gathered


def start(path: Path, **options: object) -> Started:
    return start_engine(
        Options(
            model=str(path),
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_queued_reqs=1000,
            num_threads=1,
            progress=False,
            **options,  # type: ignore[arg-type]
        )
    )


def build(started: Started, seed: int) -> list[Request]:
    intake = Intake(started.engine.config, started.tokenizer)
    return [
        intake.request(request_id=str(i), prompt_token_ids=prompt, params=params)
        for i, (prompt, params) in enumerate(requests(seed))
    ]


def drive(started: Started, asked: list[Request], rng: random.Random) -> list[Event]:
    """Add requests at random moments among the steps; abort strangers in between."""
    engine, events = started.engine, []
    pending = list(asked)
    rng.shuffle(pending)
    strangers = 0
    while pending or engine.has_unfinished:
        for _ in range(rng.randrange(4) if pending else 0):
            if pending:
                engine.add(pending.pop())
        if pending and rng.random() < 0.3:
            strangers += 1
            stranger = pending[0]
            engine.add(
                Request(
                    request_id=f"stranger-{strangers}",
                    prompt_token_ids=stranger.prompt_token_ids,
                    params=stranger.params,
                    priority=rng.randrange(-1, 2),
                )
            )
        if strangers and rng.random() < 0.3:
            engine.abort(f"stranger-{rng.randrange(strangers) + 1}")
        events += engine.step()
        engine.scheduler.check_integrity()
    assert engine.stats.kv_usage == 0
    return [event for event in events if not event.request_id.startswith("stranger")]


@cache
def alone(path: Path, **options: object) -> dict[tuple[str, int], Answer]:
    """The reference: each request by itself, in one chunk, nothing cached."""
    started = start(path, enable_prefix_caching=False, max_num_batched_tokens=512, **options)
    events: list[Event] = []
    for request in build(started, seed=0):
        started.engine.add(request)
        while started.engine.has_unfinished:
            events += started.engine.step()
    return answers(events)


def scarce(path: Path) -> int:
    """KV bytes that hold one longest sequence and little more."""
    plenty = start(path, kv_cache_bytes=32 << 20).engine.config.cache
    per_block = [g.bytes_per_block(plenty.block_size, 4) for g in plenty.groups]
    return sum(per_block) * (MAX_MODEL_LEN // plenty.block_size + 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 64, 512])
def test_together_equals_alone(
    checkpoint: Callable[[str], Path], family: str, rows: int, caching: bool
) -> None:
    path = checkpoint(family)
    started = start(
        path,
        max_num_batched_tokens=rows,
        max_num_seqs=min(24, rows),
        enable_prefix_caching=caching,
        kv_cache_bytes=32 << 20,
    )
    events = drive(started, build(started, seed=0), random.Random(rows))
    assert answers(events) == alone(path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [True, False])
def test_together_equals_alone_when_blocks_run_out(
    checkpoint: Callable[[str], Path], family: str, caching: bool
) -> None:
    path = checkpoint(family)
    started = start(
        path,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        enable_prefix_caching=caching,
        kv_cache_bytes=scarce(path),
    )
    events = drive(started, build(started, seed=0), random.Random(5))
    assert answers(events) == alone(path)
    assert started.engine.stats.num_preemptions > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_kv_in_whole_numbers_is_the_same_together_and_by_torch(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    """Chunks, cached prefixes, preemptions and drafts read back what each row wrote by itself."""
    path = checkpoint(family)
    started = start(
        path,
        kv_cache_dtype="int8",
        max_num_batched_tokens=64,
        max_num_seqs=16,
        kv_cache_bytes=scarce(path) * (8 + 4) // (4 * 8),  # heads of 8 at least
    )
    assert started.engine.config.cache.dtype == "int8"
    events = drive(started, build(started, seed=0), random.Random(5))
    assert answers(events) == alone(path, kv_cache_dtype="int8")
    assert started.engine.stats.num_preemptions > 0
    assert answers(events) == alone(path, kv_cache_dtype="int8", executor="torch")
    assert answers(events) != alone(path)  # the codes are in use


def test_rows_are_bit_identical_in_any_company(checkpoint: Callable[[str], Path]) -> None:
    """Not only the tokens: the logprobs of greedy answers agree to the last bit."""
    path = str(checkpoint("llama"))
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, ignore_eos=True)
    asked = [prompt for prompt, _ in requests(seed=1)]
    with LLM(path, dtype="float32", kv_cache_bytes=32 << 20, max_num_batched_tokens=64) as llm:
        together = llm.generate(asked, params)
    with LLM(path, dtype="float32", kv_cache_bytes=32 << 20, enable_prefix_caching=False) as llm:
        by_itself = [llm.generate([prompt], params)[0] for prompt in asked]
    for one, other in zip(together, by_itself, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
