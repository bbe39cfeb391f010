"""Drafts of every source beside everything else, on real models: no token is another for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.drafting import EagerEconomy, accepted, set_economy, verified
from support.eagle_heads import HeadShape, head_tensors, write_head
from support.peft_adapters import make_adapter
from support.served import MAX_MODEL_LEN, Answer, Served, answers, check, mixed
from support.tiny_models import make_checkpoint

from plait.platform.core import AdapterUse, Event, Request
from plait.platform.drafting import NoDrafts
from plait.platform.messages import LoadAdapter
from plait.speculative.speculator import Speculator

GENERATIONS = {name: f"{i:064x}" for i, name in enumerate("AB")}


@pytest.fixture(scope="module")
def adapters(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    targets = {"A": ["q_proj", "v_proj", "down_proj"], "B": ["o_proj", "gate_proj", "lm_head"]}
    return {
        name: make_adapter(checkpoint("llama"), root / name, r=4, lora_alpha=16, target_modules=t)
        for name, t in targets.items()
    }


@pytest.fixture(scope="module")
def drafts(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path | None]:
    """What `--draft` may name: the model itself, another of other weights, a random head."""
    root = tmp_path_factory.mktemp("drafts")
    shape = HeadShape(taps=(0, 2, 3))
    return {
        "text": None,
        "itself": checkpoint("llama"),
        "other": make_checkpoint("llama", root / "other", seed=5),
        "head": write_head(root / "head", shape, head_tensors(shape)),
    }


def served(path: Path, adapters: dict[str, Path], **options: Any) -> Served:
    """An engine with both adapters, whose drafts are verified however they fare."""
    made = Served(path, **options)
    drafter = made.engine.drafter
    assert isinstance(drafter, Speculator)
    set_economy(drafter, EagerEconomy())
    for name, generation in GENERATIONS.items():
        load = LoadAdapter(generation=generation, directory=str(adapters[name]))
        made.engine.load_adapter(load)
        while not (results := made.engine.take_adapter_results()):
            made.engine.step()
        assert results[0].error is None, results[0].error
        infos[name] = results[0].info
    return made


infos: dict[str, Any] = {}


def asked(engine: Served) -> list[Request]:
    """Requests of all kinds, over A, B, both and the base."""
    rng = random.Random(1)
    found = []
    for i, request in enumerate(mixed(engine)):
        names = ((), ("A",), ("B",), ("A", "B"))[i % 4]
        uses = tuple(
            AdapterUse(
                generation=GENERATIONS[name],
                kv_digest=infos[name].kv_digest,
                scale=rng.choice([1.0, 0.5]),
                active_from=rng.choice([0, 0, 2]),
            )
            for name in names
        )
        found.append(replace(request, adapters=uses))
    return found


@cache
def _alone(path: Path, adapters: tuple[tuple[str, Path], ...]) -> dict[tuple[str, int], Answer]:
    """The reference: each by itself, without drafts, nothing cached."""
    engine = served(path, dict(adapters), enable_prefix_caching=False, kv_cache_bytes=32 << 20)
    engine.engine._drafter = NoDrafts()
    events: list[Event] = []
    for request in asked(engine):
        engine.engine.add(request)
        events += engine.drain()
    return answers(events)


def alone(path: Path, adapters: dict[str, Path]) -> dict[tuple[str, int], Answer]:
    return _alone(path, tuple(sorted(adapters.items())))


@pytest.mark.parametrize(("rows", "caching"), [(16, True), (64, False), (256, True)])
@pytest.mark.parametrize("source", ["text", "itself", "other", "head"])
def test_any_mix_equals_alone_without_drafts(
    checkpoint: Callable[[str], Path],
    adapters: dict[str, Path],
    drafts: dict[str, Path | None],
    source: str,
    rows: int,
    caching: bool,
) -> None:
    """Sampling, penalties, logprobs, stops, grammars, `n`, adapters, chunks, prefix hits."""
    path, draft = checkpoint("llama"), drafts[source]
    engine = served(
        path,
        adapters,
        draft_model=None if draft is None else str(draft),
        max_draft_tokens=random.Random(rows).choice([3, 7]),
        max_num_batched_tokens=rows,
        max_num_seqs=min(24, rows),
        enable_prefix_caching=caching,
        kv_cache_bytes=32 << 20,
    )
    rng, pending, events = random.Random(rows), asked(engine), []
    while pending:
        engine.engine.add(pending.pop(rng.randrange(len(pending))))
        if rng.random() < 0.2:
            stranger = replace(pending[0] if pending else asked(engine)[0], request_id="stranger")
            engine.engine.add(stranger)
            events += engine.engine.step()
            engine.engine.abort("stranger")
        events += engine.engine.step()
    events = [event for event in [*events, *engine.drain()] if event.request_id != "stranger"]
    assert answers(events) == alone(path, adapters)
    assert check(alone(path, adapters)) > 8
    stats = engine.engine.stats
    name = {"text": "grammar", "head": "eagle"}.get(source, "model")
    assert verified(stats, name) > 0
    if source == "itself":  # of the base's requests alone it knows what they will choose
        assert accepted(stats, name) > verified(stats, name) / 8


@pytest.mark.parametrize(("source", "share"), [("text", 10), ("itself", 30), ("head", 17)])
def test_parked_sequences_go_on_where_they_were(
    checkpoint: Callable[[str], Path],
    adapters: dict[str, Path],
    drafts: dict[str, Path | None],
    source: str,
    share: int,
) -> None:
    path, draft = checkpoint("llama"), drafts[source]
    plenty = Served(path, kv_cache_bytes=32 << 20).engine.config.cache
    per_block = sum(g.bytes_per_block(plenty.block_size, 4) for g in plenty.groups)
    engine = served(
        path,
        adapters,
        draft_model=None if draft is None else str(draft),
        max_num_batched_tokens=64,
        # For one context and a little more, of the draft model too, and what lies beside that.
        kv_cache_bytes=per_block * (MAX_MODEL_LEN // plenty.block_size + 3) * share // 10,
    )
    for request in asked(engine):
        engine.engine.add(request)
    assert answers(engine.drain()) == alone(path, adapters)
    assert engine.engine.stats.num_preemptions > 0


def test_a_draft_model_that_is_the_model_is_always_right(
    checkpoint: Callable[[str], Path],
) -> None:
    """Greedy and sampled, with penalties and a grammar: it draws with the target's noise."""
    path = checkpoint("llama")
    engine = Served(path, draft_model=str(path), kv_cache_bytes=32 << 20, max_draft_tokens=4)
    drafter = engine.engine.drafter
    assert isinstance(drafter, Speculator)
    set_economy(drafter, EagerEconomy())
    drafter._candidates._texts = ()
    for request in mixed(engine):
        engine.engine.add(request)
    engine.drain()
    stats = engine.engine.stats
    assert accepted(stats, "model") >= 0.95 * verified(stats, "model") > 100
