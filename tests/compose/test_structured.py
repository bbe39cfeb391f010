"""Constrained answers of real models: valid, and the same in any company, forced drafts or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest
from support.drafting import accepted
from support.served import MAX_MODEL_LEN, SPECS, Answer, Served, answers, check, mixed

from plait.platform.core import Event, FinishReason, SamplingParams
from plait.platform.drafting import NoDrafts
from plait.platform.errors import BadRequest, Unsupported
from plait.platform.intake import Intake
from plait.platform.messages import Add, ToEngine


@cache
def alone(path: Path) -> dict[tuple[str, int], Answer]:
    """The reference: each by itself, no forced drafts, nothing cached."""
    served = Served(path, enable_prefix_caching=False, kv_cache_bytes=32 << 20)
    served.engine._drafter = NoDrafts()
    events: list[Event] = []
    for request in mixed(served):
        served.engine.add(request)
        events += served.drain()
    return answers(events)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_any_mix_equals_alone(checkpoint: Callable[[str], Path], rows: int, caching: bool) -> None:
    path = checkpoint("llama")
    served = Served(
        path,
        max_num_batched_tokens=rows,
        max_num_seqs=min(24, rows),
        enable_prefix_caching=caching,
        kv_cache_bytes=32 << 20,
    )
    rng, pending, events = random.Random(rows), mixed(served), []
    while pending:
        served.engine.add(pending.pop(rng.randrange(len(pending))))
        events += served.engine.step()
    events += served.drain()
    assert answers(events) == alone(path)
    assert check(alone(path)) > 8
    if rows > 1:  # where one row is all there is, there is none for drafts
        assert accepted(served.engine.stats, "grammar") > 0


@pytest.mark.parametrize("force", [True, False])
def test_parked_answers_go_on_where_they_were(
    checkpoint: Callable[[str], Path], force: bool
) -> None:
    path = checkpoint("llama")
    plenty = Served(path, kv_cache_bytes=32 << 20).engine.config.cache
    per_block = sum(g.bytes_per_block(plenty.block_size, 4) for g in plenty.groups)
    served = Served(
        path,
        max_num_batched_tokens=64,
        kv_cache_bytes=per_block * (MAX_MODEL_LEN // plenty.block_size + 3),
    )
    if not force:
        served.engine._drafter = NoDrafts()
    for request in mixed(served):
        served.engine.add(request)
    assert answers(served.drain()) == alone(path)
    assert served.engine.stats.num_preemptions > 0


def test_a_constrained_request_crosses_the_socket(checkpoint: Callable[[str], Path]) -> None:
    served = Served(checkpoint("llama"), kv_cache_bytes=32 << 20)
    request = served.request("person", 0, [5, 6], max_tokens=200, temperature=1.0, seed=1)
    frame = msgspec.msgpack.encode(Add(request=request))
    arrived = msgspec.msgpack.Decoder(ToEngine).decode(frame).request
    assert arrived == request
    served.engine.add(arrived)
    answer = answers(served.drain())["person-0", 0]
    assert check({("person-0", 0): answer}) == (answer[2] == "stop:None")


def test_what_a_grammar_cannot_go_with_is_refused_by_name(
    checkpoint: Callable[[str], Path],
) -> None:
    import dataclasses

    served = Served(checkpoint("llama"), kv_cache_bytes=32 << 20)
    with pytest.raises(BadRequest, match="ignore_eos") as refused:
        served.request("person", 0, [5], max_tokens=5, ignore_eos=True)
    assert refused.value.param == "ignore_eos"
    config = served.engine.config
    endless = dataclasses.replace(config, model=dataclasses.replace(config.model, eos_token_ids=()))
    with pytest.raises(Unsupported, match="no end token"):
        Intake(endless, served.started.tokenizer).request(
            request_id="a",
            prompt_token_ids=[5],
            params=SamplingParams(),
            grammar=served.grammars["person"],
        )


# --- the embedded model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm() -> Served:
    return Served(None, kv_cache_bytes=64 << 20)


def asked(served: Served, seed: int) -> dict[tuple[str, int], Answer]:
    encode = served.started.tokenizer.encode
    for i, name in enumerate((*SPECS, "free")):
        prompt = encode(f"A {name} in JSON with title, name, age and favourite_colour: ")
        served.engine.add(
            served.request(
                name, i, prompt, max_tokens=48, temperature=(0.0, 1.5)[seed % 2], seed=seed, n=2
            )
        )
    return answers(served.drain())


@pytest.mark.parametrize("seed", [0, 1])
def test_the_embedded_model_answers_validly_and_forced_drafts_change_nothing(
    smollm: Served, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = smollm.engine.stats
    drafted = asked(smollm, seed)
    middle = smollm.engine.stats
    monkeypatch.setattr(smollm.engine, "_drafter", NoDrafts())
    assert asked(smollm, seed) == drafted
    assert check(drafted) >= 4
    assert accepted(middle, "grammar") > accepted(before, "grammar")
    assert {end for _, _, end, _ in drafted.values()} <= {
        f"{FinishReason.STOP}:None",
        f"{FinishReason.LENGTH}:None",
    }
