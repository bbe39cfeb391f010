"""Many adapters on one real base, memory for few of them: every token as alone, and no leak."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.peft_adapters import make_adapter

from plait.adapters.info import AdapterInfo
from plait.platform.config import Options
from plait.platform.core import AdapterUse, Event, FinishReason, Request, SamplingParams
from plait.platform.messages import LoadAdapter
from plait.platform.start import Started, start_engine

COUNT, ON_DEVICE, IN_HOST = 256, 20, 60
NUM_REQUESTS = 320
TARGETS = {"q_only": ["q_proj"], "all": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]}


@pytest.fixture(scope="module")
def adapters(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Adapters of two shapes and many ranks, each with weights of its own."""
    root = tmp_path_factory.mktemp("adapters")
    made = [
        make_adapter(
            checkpoint("llama"), root / f"{name}-{r}", r=r, lora_alpha=2 * r, target_modules=targets
        )
        for name, targets in TARGETS.items()
        for r in (1, 4, 9)
    ]
    return [_variant(made[i % len(made)], root / f"variant-{i}", seed=i) for i in range(COUNT)]


def _variant(source: Path, target: Path, *, seed: int) -> Path:
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    file = target / "adapter_model.safetensors"
    tensors = {
        name: tensor * (0.5 + torch.rand(tensor.shape, generator=generator))
        for name, tensor in sorted(load_file(file).items())
    }
    save_file(tensors, file)
    return target


def generation(i: int) -> str:
    return f"{i:064x}"


def start(path: Path, **options: object) -> Started:
    return start_engine(
        Options(
            model=str(path),
            dtype="float32",
            max_model_len=256,
            max_num_queued_reqs=2000,
            num_threads=1,
            progress=False,
            **options,  # type: ignore[arg-type]
        )
    )


def load(started: Started, i: int, directory: Path) -> AdapterInfo:
    engine = started.engine
    engine.load_adapter(LoadAdapter(generation=generation(i), directory=str(directory)))
    while not (results := engine.take_adapter_results()):
        engine.step()
    (result,) = results
    assert result.info is not None, result.error
    return result.info


def run(started: Started, asked: list[Request], rng: random.Random | None) -> dict[str, list[int]]:
    """Add requests at random moments; the tokens of each by its id."""
    engine, pending = started.engine, list(reversed(asked))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    while pending or engine.has_unfinished:
        for _ in range(len(pending) if rng is None else rng.randrange(8)):
            if pending:
                engine.add(pending.pop())
        for event in engine.step():
            _take(tokens, event)
        engine.scheduler.check_integrity()
        assert engine._executor.placed_bytes <= engine.stats.adapter_device_bytes
    return tokens


def _take(tokens: dict[str, list[int]], event: Event) -> None:
    assert event.finish_reason is not FinishReason.ERROR, event.error
    tokens[event.request_id] += event.token_ids


def request(name: str, infos: list[AdapterInfo], rng: random.Random, common: list[int]) -> Request:
    chosen = rng.sample(infos, rng.choice([0, 1, 1, 1, 1, 2]))
    prompt = [*common[: rng.randrange(len(common))], *rng.choices(range(3, 300), k=5)]
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(
            max_tokens=rng.randrange(2, 8),
            temperature=rng.choice([0.0, 0.9]),
            seed=rng.randrange(99),
        ),
        adapters=tuple(
            AdapterUse(
                generation=info.generation,
                kv_digest=info.kv_digest,
                scale=rng.choice([1.0, 0.5]),
                active_from=rng.choice([0, 0, 3]),
            )
            for info in chosen
        ),
        tenant=rng.choice(["", "x"]),
    )


@cache
def _typical_bytes(path: Path, directories: tuple[Path, ...]) -> tuple[int, int]:
    """Device and host bytes of an adapter on average."""
    started = start(path, adapter_memory_bytes=64 << 20, adapter_host_bytes=64 << 20)
    infos = [load(started, i, directory) for i, directory in enumerate(directories)]
    device = sum(info.device_bytes for info in infos) // len(infos)
    return device, sum(info.num_bytes for info in infos) // len(infos)


def test_256_adapters_with_memory_for_20_answer_as_each_alone(
    checkpoint: Callable[[str], Path], adapters: list[Path]
) -> None:
    path, rng = checkpoint("llama"), random.Random(5)
    device, host = _typical_bytes(path, tuple(adapters[:6]))
    budget, host_budget = ON_DEVICE * device, IN_HOST * host
    few = start(
        path,
        adapter_memory_bytes=budget,
        adapter_host_bytes=host_budget,
        adapter_drain_s=0.05,
        max_num_seqs=32,
    )
    infos = [load(few, i, directory) for i, directory in enumerate(adapters)]
    common = rng.choices(range(3, 300), k=60)
    asked = [request(str(i), infos, rng, common) for i in range(NUM_REQUESTS)]
    together = run(few, asked, rng)

    stats = few.engine.stats
    assert stats.adapter_evictions > 50
    assert few.engine._executor.placed_bytes == stats.adapter_device_bytes <= budget
    assert stats.adapter_host_bytes <= host_budget
    assert stats.kv_usage == 0
    assert all(together.values())

    # Alone: one at a time on an engine that has memory for all, and no prefix cache.
    plenty = start(
        path,
        adapter_memory_bytes=2 * COUNT * device,
        adapter_host_bytes=2 * COUNT * host,
        enable_prefix_caching=False,
        max_num_seqs=1,
    )
    sample = rng.sample(asked, 120)
    used = {use.generation for one in sample for use in one.adapters}
    for i, directory in enumerate(adapters):
        if generation(i) in used:
            load(plenty, i, directory)
    alone = run(plenty, sample, None)
    assert plenty.engine.stats.adapter_evictions == 0
    assert {one.request_id: together[one.request_id] for one in sample} == alone

    for info in infos:
        few.engine.drop_adapter(info.generation)
    few.engine.step()
    stats = few.engine.stats
    assert (stats.adapter_device_bytes, stats.adapter_host_bytes) == (0, 0)


def test_weights_replaced_during_32_streams_are_never_mixed(
    checkpoint: Callable[[str], Path], adapters: list[Path]
) -> None:
    path, rng = checkpoint("llama"), random.Random(6)
    started = start(path, adapter_memory_bytes=32 << 20, max_num_seqs=32)
    prompts = [tuple(rng.choices(range(3, 300), k=20 + i)) for i in range(4)] * 8

    def streams(info: AdapterInfo) -> list[Request]:
        uses = (AdapterUse(generation=info.generation, kv_digest=info.kv_digest),)
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        make = partial(Request, params=params, adapters=uses)
        return [
            make(request_id=f"{info.generation[-1]}-{i}", prompt_token_ids=prompt)
            for i, prompt in enumerate(prompts)
        ]

    old = load(started, 3, adapters[3])
    expected_old = run(started, streams(old), None)
    engine = started.engine
    tokens: dict[str, list[int]] = {r.request_id: [] for r in streams(old)}
    for one in streams(old):
        engine.add(one)
    while not any(tokens.values()):
        for event in engine.step():
            _take(tokens, event)
    engine.load_adapter(LoadAdapter(generation=generation(9), directory=str(adapters[9])))
    results = []
    while not results:
        for event in engine.step():
            _take(tokens, event)
        results = engine.take_adapter_results()
    assert results[0].info is not None
    new = results[0].info
    later = streams(new)
    tokens |= {r.request_id: [] for r in later}
    for one in later:
        engine.add(one)
    while engine.has_unfinished:
        for event in engine.step():
            _take(tokens, event)
    engine.drop_adapter(old.generation)
    assert engine.stats.adapter_device_bytes == new.device_bytes

    fresh = start(path, adapter_memory_bytes=32 << 20, enable_prefix_caching=False)
    load(fresh, 9, adapters[9])
    expected_new = run(fresh, later, None)
    assert tokens == expected_old | expected_new
    assert not any(tokens[f"3-{i}"] == tokens[f"9-{i}"] for i in range(32))
