"""Adapters in the engine: real loader threads, and K/V that tell which adapter made them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_adapters import AdapterFiles
from support.history_executor import HistoryExecutor, engine_config, expected_greedy

from plait.adapters.pool import AdapterPool
from plait.adapters.strand import AdapterStrand
from plait.platform.core import AdapterUse, Event, FinishReason, Request, SamplingParams
from plait.platform.engine import Engine
from plait.platform.errors import AdapterUnavailable, BadRequest
from plait.platform.messages import AdapterLoaded

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DEVICE, HOST = 40, 200


class Server:
    """An engine with a pool, and what a client does with it."""

    def __init__(self, root: Path, **config: object) -> None:
        resolved = engine_config(**config)  # type: ignore[arg-type]
        self.files = AdapterFiles(root)
        self.executor = HistoryExecutor(resolved)
        self.pool = AdapterPool(
            self.executor, self.files.load, device_bytes=DEVICE, host_bytes=HOST
        )
        strand = AdapterStrand(self.pool, drain_s=0.2)
        self.engine = Engine(resolved, self.executor, None, strands=(strand,), adapters=self.pool)
        self.events: dict[str, list[Event]] = {}

    def load(self, generation: str, *, kv_digest: str = "", size: int = 8) -> AdapterLoaded:
        message = self.files.write(generation, device_bytes=size, kv_digest=kv_digest)
        self.engine.load_adapter(message)
        results: list[AdapterLoaded] = []
        self.until(lambda: bool(results or results.extend(self.engine.take_adapter_results())))
        (result,) = results
        return result

    def ask(self, name: str, prompt: list[int], *uses: AdapterUse) -> None:
        self.engine.add(
            Request(request_id=name, prompt_token_ids=tuple(prompt), params=GREEDY, adapters=uses)
        )

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if condition():
                return
            for event in self.engine.step():
                self.events.setdefault(event.request_id, []).append(event)
            self.engine.scheduler.check_integrity()
        raise AssertionError("it never comes")

    def run(self) -> None:
        self.until(lambda: not self.engine.has_unfinished)

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.token_ids]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def use(generation: str, kv_digest: str = "", **rest: object) -> AdapterUse:
    return AdapterUse(generation=generation, kv_digest=kv_digest, **rest)  # type: ignore[arg-type]


PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_each_answer_is_that_of_its_own_adapters_and_history(server: Server) -> None:
    digests = {f"g{i}": ["k", "m", ""][i % 3] for i in range(9)}
    for generation, digest in digests.items():
        assert server.load(generation, kv_digest=digest).error is None
    asked: dict[str, tuple[AdapterUse, ...]] = {"base": ()}
    for i, (generation, digest) in enumerate(digests.items()):
        asked[generation] = (use(generation, digest),)
        asked[f"late {generation}"] = (use(generation, digest, active_from=6),)
        other = f"g{(i + 4) % 9}"
        asked[f"both {i}"] = (
            use(generation, digest, scale=0.5),
            use(other, digests[other], active_from=i % 4),
        )
    for name, uses in asked.items():
        server.ask(name, PROMPT, *uses)
    server.run()
    for name, uses in asked.items():
        assert server.tokens(name) == expected_greedy(PROMPT, 12, uses=uses), name
    assert server.engine.stats.adapter_rows > 0
    assert server.engine.stats.adapter_evictions > 0


def test_generations_with_one_effect_on_kv_share_blocks_and_others_none(server: Server) -> None:
    for generation, digest in {"a": "k", "b": "k", "c": "m", "head": ""}.items():
        server.load(generation, kv_digest=digest)
    found = {}
    for name, used in {
        "base": (),
        "a": (use("a", "k"),),
        "b": (use("b", "k"),),
        "c": (use("c", "m"),),
        "half": (use("a", "k", scale=0.5),),
        "head": (use("head"),),
        "late": (use("c", "m", active_from=8),),
    }.items():
        server.ask(name, PROMPT, *used)
        server.run()
        found[name] = server.events[name][-1].num_cached_tokens
        assert server.tokens(name) == expected_greedy(PROMPT, 12, uses=used)
    assert found == {"base": 0, "a": 0, "b": 8, "c": 0, "half": 0, "head": 8, "late": 8}


def test_weights_replaced_during_streams_leave_old_ones_on_the_old_generation(
    server: Server,
) -> None:
    server.load("old", kv_digest="old", size=16)
    for i in range(16):
        server.ask(f"old {i}", [*PROMPT, i + 3], use("old", "old"))
    server.until(lambda: server.engine.stats.num_steps > 4)
    assert server.load("new", kv_digest="new", size=16).info is not None
    for i in range(16):
        server.ask(f"new {i}", [*PROMPT, i + 3], use("new", "new"))
    server.run()
    for i in range(16):
        prompt = [*PROMPT, i + 3]
        old = expected_greedy(prompt, 12, uses=(use("old", "old"),))
        new = expected_greedy(prompt, 12, uses=(use("new", "new"),))
        assert server.tokens(f"old {i}") == old
        assert server.tokens(f"new {i}") == new
    assert server.engine.stats.adapter_device_bytes == 32
    server.engine.drop_adapter("old")
    assert server.engine.stats.adapter_device_bytes == 16
    assert set(server.executor.placed) == {"new"}


def test_waiting_for_an_adapter_neither_spins_nor_misses_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.load("big", size=30)
    server.load("slow", size=30)
    assert set(server.executor.placed) == {"big"}
    place = server.executor.place_adapter

    def slowly(adapter: object) -> None:
        time.sleep(0.1)
        place(adapter)  # type: ignore[arg-type]

    monkeypatch.setattr(server.executor, "place_adapter", slowly)
    server.ask("x", PROMPT, use("slow"))
    count = 0
    began = time.monotonic()
    while server.engine.has_unfinished:
        server.engine.step()
        count += 1
    assert count < 100, "it spins"
    assert time.monotonic() - began < 5


def test_states_and_figures_tell_where_adapters_lie(server: Server) -> None:
    server.load("a", size=30)
    server.load("b", size=30)
    states = server.engine.adapter_states()
    assert states is not None
    assert {g: s.level for g, s in states.items()} == {"a": "device", "b": "host"}
    assert server.engine.adapter_states() is None
    assert server.engine.stats.adapter_loads == 2
    assert server.engine.stats.adapter_placements == 1
    server.engine.pin_adapter("b", True)
    server.until(lambda: "b" in server.executor.placed)
    states = server.engine.adapter_states()
    assert states is not None
    assert (states["a"].level, states["b"].pinned) == ("host", True)


def test_an_engine_without_a_pool_refuses_and_never_answers_as_the_base() -> None:
    resolved = engine_config()
    engine = Engine(resolved, HistoryExecutor(resolved), None)
    request = Request(request_id="x", prompt_token_ids=(3,), params=GREEDY, adapters=(use("g"),))
    with pytest.raises(AdapterUnavailable, match="--adapter-memory"):
        engine.add(request)
    assert not engine.has_unfinished


def test_adapters_that_cannot_be_combined_are_refused_at_once(server: Server) -> None:
    for uses, match in [
        ((use("a"), use("a")), "twice"),
        (tuple(use(str(i)) for i in range(9)), "9 adapters"),
        ((use("a", scale=0.0),), "scale"),
        ((use("a", scale=float("nan")),), "scale"),
    ]:
        with pytest.raises(BadRequest, match=match):
            server.ask("x", PROMPT, *uses)


def test_an_adapter_that_is_lost_ends_its_requests_alone(server: Server) -> None:
    for generation in ("a", "b", "c", "d", "e"):
        server.load(generation, size=30)  # the host tier has room for three
    for path in (server.files.root / "b").iterdir():
        path.unlink()
    server.ask("lost", PROMPT, use("b"))
    server.ask("kept", PROMPT, use("c"))
    server.run()
    last = server.events["lost"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert last.error[0] == "lora_storage_unavailable"
    assert server.tokens("kept") == expected_greedy(PROMPT, 12, uses=(use("c"),))
