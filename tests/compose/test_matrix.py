"""All four at once: each combination of adapters, images, drafts and grammars, beside all others.

Requests of 192 kinds run in batches that share everything and have too little of it: KV blocks, so
that they park; embeddings, so that these are evicted; rows. Each answer, to the last bit of its
log-probabilities, is that of the same request alone, without drafts and with nothing cached.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.drafting import accepted, verified
from support.matrix_world import DRAFTS, NUM_ROWS, Answer, Cell, World, Woven, cells, is_valid

from plait.adapters.strand import AdapterStrand
from plait.platform import batch as batches
from plait.platform import sampling
from plait.structured import masks
from plait.vision import strand as vision_strand

Answers = dict[tuple[str, int], Answer]

KINDS = {
    "torch": {"executor": "torch", "dtype": "float32"},
    "native": {"executor": "native", "dtype": "float32"},
    "bfloat16": {"executor": "native", "dtype": "bfloat16"},
    "int8": {"executor": "native", "dtype": "bfloat16", "quantization": "int8"},
}
NUM_BLOCKS = 44  # for the contexts of a handful of requests
SOURCES = {"model": ["model"], "ngram": ["ngram", "suffix"], "forced": ["grammar"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def alone(world: World) -> Callable[[str], Answers]:
    """By kind of engine: what each cell says by itself, without drafts."""
    made: dict[str, Answers] = {}

    def get(kind: str) -> Answers:
        if kind not in made:
            engine = Woven(
                world, enable_prefix_caching=False, max_num_batched_tokens=512, **KINDS[kind]
            )
            made[kind] = engine.without_drafts().alone(cells())
        return made[kind]

    return get


def scarce(world: World, kind: str, **options: Any) -> Woven:
    """An engine with blocks for few requests, and embeddings of three images."""
    num_bytes = 4 if KINDS[kind]["dtype"] == "float32" else 2
    text = world.model.config.text_config
    heads, size = text.num_key_value_heads, text.hidden_size // text.num_attention_heads
    per_block = 2 * text.num_hidden_layers * heads * size * 16 * num_bytes
    given: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 24,
        "kv_cache_bytes": 2 * per_block * NUM_BLOCKS,  # of the draft model, too
        "encoder_cache_bytes": 3 * NUM_ROWS * text.hidden_size * num_bytes,
    }
    return Woven(world, **{**given, **KINDS[kind], **options})


def differing(found: Answers, expected: Answers) -> list[tuple[str, int]]:
    """Whose answers are others; none is missing."""
    assert found.keys() == expected.keys()
    return [who for who, answer in expected.items() if found[who] != answer]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("torch", {}),
        ("native", {}),
        ("native", {"by_cell": False, "max_num_batched_tokens": 24, "max_num_seqs": 12}),
        ("bfloat16", {}),
        ("int8", {}),
    ],
    ids=["torch", "native", "native, all sources for all", "bfloat16", "int8"],
)
def test_every_combination_in_running_batches_equals_itself_alone(
    world: World,
    alone: Callable[[str], Answers],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    options: dict[str, Any],
) -> None:
    expected = alone(kind)
    engine = scarce(world, kind, trace_steps=str(tmp_path / "steps"), **options)
    assert engine.engine.config.model.executor == KINDS[kind]["executor"]
    assert differing(engine.together(engine.requests(cells()), seed=1), expected) == []
    stats = engine.engine.stats
    assert stats.num_preemptions > 10
    assert stats.encoder_evictions > 10
    assert min(stats.encoder_hits, stats.prefix_hits) > 10
    for sources in SOURCES.values():
        assert sum(verified(stats, source) for source in sources) > 30
        assert sum(accepted(stats, source) for source in sources) > 20
    engine.unload()
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []
    check_trace(tmp_path / "steps", stats)


def check_trace(path: Path, stats: Any) -> None:
    """All four met in many steps, and the lines add up to what the counters say."""
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    totals: Counter[str] = Counter()
    for step in steps:
        totals.update(step["rows"])
        assert step["seconds"] > 0
        assert (step["adapters"] > 0) == (step["rows"]["adapter"] > 0)
    four = ("adapter", "image", "draft", "masked")
    has_all = [step for step in steps if all(step["rows"][kind] for kind in four)]
    assert len(has_all) >= 5
    assert len(has_all) <= stats.steps_by_strands[0b1111]
    assert any(step["adapters"] == 2 for step in has_all)
    assert totals["draft"] == sum(verified for verified, _ in stats.drafts.values())
    assert totals["image"] == stats.image_rows
    drafts: Counter[str] = Counter()
    sequences: Counter[str] = Counter()
    for step in steps:
        drafts.update({source: verified for source, (verified, _) in step["drafts"].items()})
        sequences.update(step["sequences"])
    assert dict(drafts) == {source: v for source, (v, _) in stats.drafts.items() if v}
    assert sequences["preempted"] == stats.num_preemptions
    assert sequences["finished"] >= len(cells())
    assert sum(step["tokens"] for step in steps) <= stats.generation_tokens


def test_answers_tell_what_was_asked(alone: Callable[[str], Answers]) -> None:
    """Else that they are equal would mean little: each strand changes them, and grammars hold."""
    expected = alone("native")
    by_cell = {cell: expected[cell.name, 0] for cell in cells()}
    for cell, (_, text, end, _) in by_cell.items():
        if cell.grammar:
            assert end == "stop"
            assert is_valid(cell.grammar, text)
    asked = {cell.number: answer for cell, answer in by_cell.items()}
    assert len({logprobs for _, _, _, logprobs in asked.values()}) == len(asked)
    free = {
        (cell.adapters, cell.images): answer[0]
        for cell, answer in by_cell.items()
        if not cell.grammar
    }
    assert len(set(free.values())) == len(free)
    assert len({name.split("/")[2] for name, _ in expected}) == len(DRAFTS)


# --- that the test can fail ----------------------------------------------------------------------


def adapters_miss_the_last_row(patch: pytest.MonkeyPatch) -> None:
    found = batches._adapter_segments

    def shorter(*given: Any) -> Any:
        segments = (replace(s, end=s.end - 1) if s.end - s.start > 1 else s for s in found(*given))
        return tuple(segments)

    patch.setattr(batches, "_adapter_segments", shorter)


def blocks_know_no_adapter(patch: pytest.MonkeyPatch) -> None:
    load = Woven._load
    patch.setattr(Woven, "_load", lambda *given: replace(load(*given), kv_digest=""))


def embeddings_know_no_adapter(patch: pytest.MonkeyPatch) -> None:
    key = vision_strand.encoder_key
    patch.setattr(vision_strand, "encoder_key", lambda r, item: key(replace(r, adapters=()), item))


def drafts_are_taken_on_trust(patch: pytest.MonkeyPatch) -> None:
    choose = sampling.Sampler._choose

    def trusting(self: Any, seq: Any, drafts: tuple[int, ...], row: Any) -> int:
        token = choose(self, seq, drafts, row)
        proposed = seq.drafts[len(drafts) : len(drafts) + 1]
        return proposed[0] if proposed and not row.masked else token

    patch.setattr(sampling.Sampler, "_choose", trusting)


def noise_is_of_the_row(patch: pytest.MonkeyPatch) -> None:
    key = sampling.stream_key
    calls = iter(range(1 << 30))
    patch.setattr(sampling, "stream_key", lambda seed, i, at: key(seed, i, at + next(calls) % 2))


def masks_forget_drafts(patch: pytest.MonkeyPatch) -> None:
    made = masks.MaskEntry
    from plait.structured import strand

    def without(*, drafts: tuple[int, ...], **more: Any) -> Any:
        return made(drafts=drafts[:0], **more)

    patch.setattr(strand, "MaskEntry", without)


FAULTS = [
    adapters_miss_the_last_row,
    blocks_know_no_adapter,
    embeddings_know_no_adapter,
    drafts_are_taken_on_trust,
    noise_is_of_the_row,
    masks_forget_drafts,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(
    world: World,
    alone: Callable[[str], Answers],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    def is_wanted(cell: Cell) -> bool:
        return cell.images > 0 and cell.draft in ("ngram", "model") and cell.grammar != "tool"

    chosen = [cell for cell in cells() if is_wanted(cell)][::2]
    names = {cell.name for cell in chosen}
    expected = {who: answer for who, answer in alone("native").items() if who[0] in names}
    fault(monkeypatch)
    engine = scarce(world, "native")
    with pytest.raises(AssertionError):
        assert differing(engine.together(engine.requests(chosen), seed=2), expected) == []


def test_what_is_not_given_back_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterStrand, "release", lambda *_: None)
    engine = scarce(world, "native")
    chosen = [cell for cell in cells() if cell.has_all][:1]
    with pytest.raises(AssertionError, match="leases"):
        engine.together(engine.requests(chosen), seed=3)
