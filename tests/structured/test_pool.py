"""Compiling in processes that are given up: bounds, caches, one compile for all who ask."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.grammars import WIDTH, accepts, vocabulary

from plait.platform.errors import (
    BadRequest,
    GrammarDelayed,
    GrammarTooComplex,
    InvalidSchema,
    Overloaded,
    PlaitError,
    UnsupportedSchemaKeyword,
)
from plait.structured.cache import DiskCache, MemoryCache
from plait.structured.matcher import MatcherStore
from plait.structured.pool import CompilePool, PoolSettings
from plait.structured.spec import CompiledGrammar, GrammarKind, GrammarSpec
from plait.structured.work import job_of
from plait.structured.worker import CompileWorker, TookTooLong, TookTooMuch, WorkerLimits

# A busy machine is slow; what must end does so long before a test would be given up.
MARGIN_S = 20


def schema(content: object, **fields: object) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=content, **fields)


def closed(**properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def outcome(pool: CompilePool, spec: GrammarSpec) -> CompiledGrammar | PlaitError:
    try:
        return pool.compile_blocking(spec)
    except PlaitError as error:
        return error


@pytest.fixture(scope="module")
def pool():
    pool = CompilePool(vocabulary(), PoolSettings(wall_limit_s=MARGIN_S))
    yield pool
    pool.close()


def deep_one_of(depth: int) -> object:
    if depth == 0:
        return {"type": "string"}
    inner = deep_one_of(depth - 1)
    return {"oneOf": [closed(a=inner), closed(b=inner), closed(c=inner)]}


def recursive(number: int) -> object:
    names = [f"d{i}" for i in range(number)]
    refs = [{"$ref": f"#/$defs/{name}"} for name in names]
    every = {"type": "object", "properties": dict(zip(names, refs, strict=True))}
    return {"$defs": dict.fromkeys(names, every), "allOf": refs}


def repeated(count: int) -> str:
    return "root ::= " + " ".join(f"[a-z]{{0,{count + i}}}" for i in range(20))


BOMBS = {
    "20 distinct lengths": schema(
        closed(**{f"p{i}": {"type": "string", "maxLength": 1000 + i} for i in range(20)})
    ),
    "20 patterns": schema(
        closed(**{f"p{i}": {"type": "string", "pattern": f"^.{{0,{900 + i}}}$"} for i in range(20)})
    ),
    "deep oneOf": schema(deep_one_of(7)),
    "exponential regex": GrammarSpec(kind=GrammarKind.REGEX, content="(a|b|c){0,400}" * 40),
    "nested repetition": GrammarSpec(kind=GrammarKind.REGEX, content="((((a{0,99}){0,99}){0,99})"),
    "grammar of repetitions": GrammarSpec(kind=GrammarKind.GRAMMAR, content=repeated(700)),
    "references to all": schema(recursive(40)),
    "20,000 strings": schema({"enum": [f"v{i}_{i * 7919}" for i in range(20_000)]}),
    "50,000 properties": schema(closed(**{f"key{i}": {"type": "string"} for i in range(50_000)})),
    "deep nesting": schema({"type": "array"}),
}
_inner: object = {"type": "string"}
for _ in range(300):
    _inner = {"type": "array", "items": _inner}
BOMBS["deep nesting"] = schema(_inner)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_within_its_limit_and_what_follows_compiles(pool, name):
    """In one error, or as a grammar that is bounded; other compiles go on right after it."""
    began = time.monotonic()
    ended = outcome(pool, BOMBS[name])
    if isinstance(ended, PlaitError):
        assert isinstance(ended, BadRequest)
        assert ended.param == "response_format"
        assert ended.message
    else:
        assert ended.num_bytes < 200 << 20
    assert time.monotonic() - began < 2 + MARGIN_S
    after = pool.compile_blocking(schema(closed(**{name: {"type": "integer"}})))
    assert after.payload


def test_beyond_the_limit_of_processor_time_the_error_says_so_and_others_compile_meanwhile():
    settings = PoolSettings(
        num_workers=2, processor_limit_s=0.7, wall_limit_s=MARGIN_S, has_spare=False
    )
    pool = CompilePool(vocabulary(), settings)
    try:
        pool.compile_blocking(schema({"type": "boolean"}))

        async def run():
            bomb = asyncio.ensure_future(pool.compile(BOMBS["grammar of repetitions"]))
            others = [pool.compile(schema(closed(**{f"k{i}": {}}))) for i in range(3)]
            compiled = await asyncio.gather(*others)
            assert all(each.payload for each in compiled)
            with pytest.raises(GrammarTooComplex, match=r"more than 0\.7 s of proc") as caught:
                await bomb
            return caught.value.param

        assert asyncio.run(run()) == "response_format"
        assert pool.stats.counts["killed_processor"] == 1
        began = time.monotonic()
        with pytest.raises(GrammarTooComplex):
            pool.compile_blocking(BOMBS["grammar of repetitions"])
        assert time.monotonic() - began < 0.5  # remembered
        assert pool.stats.counts["hits_refused"] == 1
    finally:
        pool.close()


def stopped(pool: CompilePool) -> int:
    """The process id of the pool's one worker, which is ready, and has no processor any more."""
    pool.compile_blocking(schema({"type": "boolean"}))
    (pid,) = pool.worker_pids
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_grammar_that_waits_for_the_processor_is_not_too_complex():
    """What its worker does not get counts for nothing, be it more than it may take."""
    limit_s = 0.5
    settings = PoolSettings(processor_limit_s=limit_s, wall_limit_s=MARGIN_S, has_spare=False)
    pool = CompilePool(vocabulary(), settings)
    try:
        pid = stopped(pool)
        with ThreadPoolExecutor(1) as asking:
            answer = asking.submit(pool.compile_blocking, schema(closed(a={"type": "integer"})))
            try:
                with pytest.raises(TimeoutError):
                    answer.result(timeout=2 * limit_s)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert answer.result().payload
        assert pool.stats.counts == {"compiled": 2}
        assert pool.worker_pids == [pid]
    finally:
        pool.close()


# More than a socket holds is not even sent to a worker that does not read.
@pytest.mark.parametrize("num_bytes", [10, 900_000])
def test_a_worker_that_stands_still_costs_a_retry_and_is_replaced(num_bytes):
    """That is not kept as the grammar's outcome: the next one who asks gets the grammar."""
    pool = CompilePool(vocabulary(), PoolSettings(wall_limit_s=2.0, has_spare=False))
    spec = GrammarSpec(kind=GrammarKind.REGEX, content="a" * num_bytes)
    try:
        pid = stopped(pool)
        began = time.monotonic()
        with pytest.raises(GrammarDelayed, match="Retry") as caught:
            pool.compile_blocking(spec)
        assert 2 <= time.monotonic() - began < 2 + MARGIN_S
        assert isinstance(caught.value, Overloaded)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        after = outcome(pool, spec)
        if num_bytes < 64 << 10:
            assert isinstance(after, CompiledGrammar)
        else:
            assert isinstance(after, GrammarTooComplex)
        assert pool.stats.counts["killed_time"] == pool.stats.counts["failed"] == 1
        assert pool.worker_pids != [pid]
        assert not Path(f"/proc/{pid}").exists()
    finally:
        pool.close()


def test_a_worker_that_its_own_alarm_ends_was_too_late_and_nothing_worse():
    """On a busy machine its clock may be read before the pool's."""
    limits = WorkerLimits(processor_limit_s=MARGIN_S, wall_limit_s=MARGIN_S, memory_bytes=1 << 30)
    late = CompileWorker(limits)
    try:
        late.learn(vocabulary())
        os.kill(late.pid, signal.SIGALRM)
        with pytest.raises(TookTooLong) as caught:
            late.compile(job_of(schema({}), vocabulary()))
        assert not caught.value.starting
    finally:
        late.kill()


def test_a_worker_ends_by_itself_when_a_job_has_used_up_its_processor_time():
    """A job that burns ends by the timer of processor time, also where the parent blocks it."""
    limits = WorkerLimits(processor_limit_s=0.3, wall_limit_s=MARGIN_S, memory_bytes=1 << 30)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    ignored = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    try:
        burning = CompileWorker(limits)
    finally:
        signal.signal(signal.SIGPROF, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        burning.learn(vocabulary())
        with pytest.raises(TookTooMuch):
            burning.compile(job_of(BOMBS["grammar of repetitions"], vocabulary()))
        assert burning.kill() == -signal.SIGPROF
    finally:
        burning.kill()


def test_memory_has_a_limit_too():
    limited = PoolSettings(
        memory_bytes=24 << 20,
        processor_limit_s=MARGIN_S,
        wall_limit_s=2 * MARGIN_S,
        has_spare=False,
    )
    pool = CompilePool(vocabulary(), limited)
    try:
        with pytest.raises(GrammarTooComplex, match="memory"):
            pool.compile_blocking(BOMBS["grammar of repetitions"])
        pool.compile_blocking(schema({"type": "null"}))
    finally:
        pool.close()


def test_what_is_compiled_works_in_the_engine(pool):
    store = MatcherStore()
    for content in (closed(a={"type": "integer"}), closed(a={"type": "string", "maxLength": 3})):
        compiled = pool.compile_blocking(schema(content))
        text = '{"a":12}' if compiled.backend == "xgrammar" else '{"a":"日本x"}'
        assert accepts(store.open(compiled, vocabulary()), text)
    backends = {
        pool.compile_blocking(schema(closed(a=each))).backend
        for each in ({"type": "integer"}, {"type": "string", "maxLength": 3})
    }
    assert backends == {"xgrammar", "llguidance"}


def test_refusals_are_the_routers_with_the_field_of_each_request(pool):
    bad = {"type": "object", "if": {"minProperties": 2}, "then": {"maxProperties": 4}}
    for param in ("response_format", "structured_outputs"):
        with pytest.raises(UnsupportedSchemaKeyword) as caught:
            pool.compile_blocking(schema(bad, param=param))
        assert caught.value.param == param
    with pytest.raises(InvalidSchema, match="no JSON"):
        pool.compile_blocking(schema({"const": object()}))
    with pytest.raises(BadRequest):
        pool.compile_blocking(schema({"const": "\ud800"}))


def test_key_order_and_numbers_of_any_size_are_kept(pool):
    store = MatcherStore()
    one = pool.compile_blocking(schema(closed(a={"type": "null"}, b={"type": "null"})))
    two = pool.compile_blocking(schema(closed(b={"type": "null"}, a={"type": "null"})))
    assert accepts(store.open(two, vocabulary()), '{"b":null,"a":null}')
    assert not accepts(store.open(one, vocabulary()), '{"b":null,"a":null}')
    big = pool.compile_blocking(schema({"const": 10**30}))
    assert accepts(store.open(big, vocabulary()), str(10**30))


def test_equal_requests_share_one_compile_and_then_the_cache(pool):
    spec = schema(closed(shared={"type": "string"}))
    before = pool.stats.counts.get("compiled", 0)

    async def run():
        return await asyncio.gather(*(pool.compile(spec) for _ in range(20)))

    compiled = asyncio.run(run())
    assert len({id(each) for each in compiled}) == 1
    assert pool.compile_blocking(spec) is compiled[0]
    assert pool.stats.counts["compiled"] == before + 1


def test_one_who_leaves_takes_the_compile_from_nobody(pool):
    spec = schema(closed(left={"type": "string"}))

    async def run():
        impatient = asyncio.ensure_future(pool.compile(spec))
        patient = asyncio.ensure_future(pool.compile(spec))
        await asyncio.sleep(0)
        impatient.cancel()
        return await patient

    assert asyncio.run(run()).payload


def test_the_queue_and_each_tenants_part_of_it_are_bounded():
    settings = PoolSettings(max_pending=4, max_pending_per_tenant=2, has_spare=False)
    pool = CompilePool(vocabulary(), settings)

    async def run():
        def ask(number, tenant):
            return asyncio.ensure_future(
                pool.compile(schema(closed(**{f"{tenant}{number}": {}})), tenant=tenant)
            )

        first = [ask(i, "a") for i in range(3)]
        await asyncio.sleep(0)
        second = [ask(i, "b") for i in range(2)]
        third = ask(0, "c")
        return await asyncio.gather(*first, *second, third, return_exceptions=True)

    try:
        results = asyncio.run(run())
        assert [isinstance(each, Overloaded) for each in results] == [
            False,
            False,
            True,  # the third of a
            False,
            False,
            True,  # the fifth of all
        ]
        assert pool.stats.num_pending == 0
    finally:
        pool.close()


def test_a_worker_killed_from_outside_costs_nobody_a_request():
    """Every fifth request one is killed, at work, ready or starting."""
    pool = CompilePool(vocabulary())
    rng = random.Random(0)
    num_killed = 0
    try:
        with ThreadPoolExecutor(1) as asking:
            for number in range(30):
                spec = schema(closed(**{f"k{number}": {}, f"j{number}": {"type": "number"}}))
                answer = asking.submit(pool.compile_blocking, spec)
                pids = pool.worker_pids
                if pids and number % 5 == 1:
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    num_killed += 1
                assert answer.result().payload
        assert num_killed >= 4
        assert pool.stats.num_pending == 0
    finally:
        pool.close()


def test_a_worker_that_is_slow_to_start_is_waited_for():
    """It reads nothing until Python has started, which takes seconds where all cores are busy."""
    limits = WorkerLimits(processor_limit_s=1e-6, wall_limit_s=1e-6, memory_bytes=1 << 30)
    large = vocabulary().extended({WIDTH + i: b"%01000d" % i for i in range(600)})
    slow = CompileWorker(limits)
    try:
        slow.learn(large)
        assert slow.alive
    finally:
        slow.kill()


def test_no_process_is_left(pool):
    other = CompilePool(vocabulary())
    other.compile_blocking(schema({"type": "boolean"}))
    pids = other.worker_pids
    other.close()
    other.close()
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(Overloaded):
        other.compile_blocking(schema({"type": "boolean"}))


def test_workers_end_with_their_parent():
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from support.grammars import vocabulary\n"
        "from plait.structured.pool import CompilePool\n"
        "from plait.structured.spec import CompiledGrammar, GrammarKind, GrammarSpec\n"
        "import os, signal\n"
        "pool = CompilePool(vocabulary())\n"
        "pool.compile_blocking(GrammarSpec(kind=GrammarKind.JSON_OBJECT))\n"
        "print(*pool.worker_pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids, done.stderr
    deadline = time.monotonic() + MARGIN_S
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        os.sched_yield()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_thousand_schemas_leave_memory_bounded():
    settings = PoolSettings(cache_bytes=1 << 20, has_spare=False)
    pool = CompilePool(vocabulary(), settings)
    store = MatcherStore(budget_bytes=1 << 20)
    try:
        sizes = []
        for number in range(1000):
            each = {"type": "integer"} if number % 3 else {"type": "string", "maxLength": 9}
            compiled = pool.compile_blocking(schema(closed(**{f"key{number}": each})))
            store.open(compiled, vocabulary())
            if number in (300, 999):
                status = Path(f"/proc/{pool.worker_pids[0]}/statm").read_text().split()
                sizes.append(int(status[1]) * os.sysconf("SC_PAGE_SIZE"))
        assert pool.stats.cache_bytes <= 1 << 20
        assert store.num_bytes <= 1 << 20
        assert sizes[1] - sizes[0] < 100 << 20
    finally:
        pool.close()


# --- caches ---


def test_what_one_server_compiled_another_finds_on_disk(tmp_path):
    spec = schema(closed(disk={"type": "string"}))
    settings = PoolSettings(cache_dir=tmp_path / "grammars", has_spare=False)
    first = CompilePool(vocabulary(), settings)
    compiled = first.compile_blocking(spec)
    first.close()
    second = CompilePool(vocabulary(), settings)
    try:
        assert second.compile_blocking(spec) == compiled
        assert second.stats.counts == {"hits_disk": 1}
        (file,) = (tmp_path / "grammars").iterdir()
        file.write_bytes(file.read_bytes()[:-3] + b"abc")
    finally:
        second.close()
    third = CompilePool(vocabulary(), settings)
    try:
        assert third.compile_blocking(spec) == compiled
        assert third.stats.counts == {"compiled": 1}  # what was changed counts as absent
    finally:
        third.close()


def test_the_disk_cache_drops_what_was_unused_longest(tmp_path):
    cache = DiskCache(tmp_path, budget_bytes=4000)
    for number in range(5):
        cache.put(f"{number:x}" * 4, bytes(1000))
        os.utime(tmp_path / f"{f'{number:x}' * 4}.grammar", (number, number))
    assert cache.get("0000") == bytes(1000)  # used now
    cache.prune()
    kept = sorted(path.name[0] for path in tmp_path.iterdir())
    assert kept == ["0", "3", "4"]
    assert cache.get("1111") is None
    with pytest.raises(ValueError, match="no key"):
        cache.get("../x")


def test_a_disk_that_fails_fails_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "folder")
    cache.put("ab", b"x")
    assert cache.get("ab") is None


def test_the_memory_cache_keeps_what_was_used_last_within_its_bytes():
    cache: MemoryCache[int] = MemoryCache(100)
    rng = random.Random(1)
    for step in range(500):
        key = str(rng.randrange(20))
        if rng.random() < 0.5:
            cache.put(key, step, rng.randrange(1, 60))
            assert cache.get(key) == step
        else:
            cache.get(key)
        cache.check_integrity()
    cache.put("large", 1, 101)
    assert cache.get("large") is None


def test_small_grammars_do_not_wait_behind_one_that_takes_long():
    """The spare takes them; then it is the spare again."""
    pool = CompilePool(vocabulary(), PoolSettings(wall_limit_s=4 * MARGIN_S))
    try:
        pool.start()
        deadline = time.monotonic() + MARGIN_S
        while not pool.worker_pids:  # the spare comes behind the first grammar
            assert time.monotonic() < deadline
            os.sched_yield()
        (at_work,) = pool.worker_pids
        pool.compile_blocking(schema({"type": "boolean"}))
        os.kill(at_work, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as asking:
            stuck = asking.submit(pool.compile_blocking, schema(closed(a={"type": "integer"})))
            try:
                for number in range(3):
                    assert pool.compile_blocking(schema(closed(**{f"k{number}": {}}))).payload
                assert not stuck.done()
            finally:
                os.kill(at_work, signal.SIGCONT)
            assert stuck.result().payload
        assert pool.stats.counts == {"compiled": 5}
        assert at_work in pool.worker_pids
    finally:
        pool.close()


def test_what_waits_is_not_relieved_while_all_goes_on():
    pool = CompilePool(vocabulary(), PoolSettings(relief_after_s=MARGIN_S))
    try:
        with ThreadPoolExecutor(8) as asking:
            specs = [schema(closed(**{f"k{number}": {}})) for number in range(16)]
            assert all(each.payload for each in asking.map(pool.compile_blocking, specs))
        assert len(pool.worker_pids) <= 2
    finally:
        pool.close()
