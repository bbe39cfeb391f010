"""What takes too much time or memory is given up, with its worker, and costs nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.compiling import MARGIN_S, outcome
from support.grammars import vocabulary
from support.schemas import closed, schema_spec

from plait.platform.errors import (
    BadRequest,
    GrammarDelayed,
    GrammarTooComplex,
    Overloaded,
    PlaitError,
)
from plait.structured.pool import CompilePool, PoolSettings
from plait.structured.spec import CompiledGrammar, GrammarKind, GrammarSpec
from plait.structured.work import job_of
from plait.structured.worker import CompileWorker, TookTooLong, TookTooMuch, WorkerLimits


def deep_one_of(depth: int) -> object:
    if depth == 0:
        return {"type": "string"}
    inner = deep_one_of(depth - 1)
    return {"oneOf": [closed({"a": inner}), closed({"b": inner}), closed({"c": inner})]}


def recursive(number: int) -> object:
    names = [f"d{i}" for i in range(number)]
    refs = [{"$ref": f"#/$defs/{name}"} for name in names]
    every = {"type": "object", "properties": dict(zip(names, refs, strict=True))}
    return {"$defs": dict.fromkeys(names, every), "allOf": refs}


def repeated(count: int) -> str:
    return "root ::= " + " ".join(f"[a-z]{{0,{count + i}}}" for i in range(20))


BOMBS = {
    "20 distinct lengths": schema_spec(
        closed({f"p{i}": {"type": "string", "maxLength": 1000 + i} for i in range(20)})
    ),
    "20 patterns": schema_spec(
        closed({f"p{i}": {"type": "string", "pattern": f"^.{{0,{900 + i}}}$"} for i in range(20)})
    ),
    "deep oneOf": schema_spec(deep_one_of(7)),
    "exponential regex": GrammarSpec(kind=GrammarKind.REGEX, content="(a|b|c){0,400}" * 40),
    "nested repetition": GrammarSpec(kind=GrammarKind.REGEX, content="((((a{0,99}){0,99}){0,99})"),
    "grammar of repetitions": GrammarSpec(kind=GrammarKind.GRAMMAR, content=repeated(700)),
    "references to all": schema_spec(recursive(40)),
    "20,000 strings": schema_spec({"enum": [f"v{i}_{i * 7919}" for i in range(20_000)]}),
    "50,000 properties": schema_spec(
        closed({f"key{i}": {"type": "string"} for i in range(50_000)})
    ),
    "deep nesting": schema_spec({"type": "array"}),
}
_inner: object = {"type": "string"}
for _ in range(300):
    _inner = {"type": "array", "items": _inner}
BOMBS["deep nesting"] = schema_spec(_inner)


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
    after = pool.compile_blocking(schema_spec(closed({name: {"type": "integer"}})))
    assert after.payload


def test_beyond_the_limit_of_processor_time_the_error_says_so_and_others_compile_meanwhile():
    settings = PoolSettings(
        num_workers=2, processor_limit_s=0.7, wall_limit_s=MARGIN_S, has_spare=False
    )
    pool = CompilePool(vocabulary(), settings)
    try:
        pool.compile_blocking(schema_spec({"type": "boolean"}))

        async def run():
            bomb = asyncio.ensure_future(pool.compile(BOMBS["grammar of repetitions"]))
            others = [pool.compile(schema_spec(closed({f"k{i}": {}}))) for i in range(3)]
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
    pool.compile_blocking(schema_spec({"type": "boolean"}))
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
            answer = asking.submit(
                pool.compile_blocking, schema_spec(closed({"a": {"type": "integer"}}))
            )
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
            late.compile(job_of(schema_spec({}), vocabulary()))
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
        pool.compile_blocking(schema_spec({"type": "null"}))
    finally:
        pool.close()
