"""Workers that die, start slowly, are left behind or grow."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.compiling import MARGIN_S
from support.grammars import WIDTH, vocabulary
from support.schemas import closed, schema_spec

from plait.platform.errors import (
    Overloaded,
)
from plait.structured.matcher import MatcherStore
from plait.structured.pool import CompilePool, PoolSettings
from plait.structured.worker import CompileWorker, WorkerLimits


def test_a_worker_killed_from_outside_costs_nobody_a_request():
    """Every fifth request one is killed, at work, ready or starting."""
    pool = CompilePool(vocabulary())
    rng = random.Random(0)
    num_killed = 0
    try:
        with ThreadPoolExecutor(1) as asking:
            for number in range(30):
                spec = schema_spec(closed({f"k{number}": {}, f"j{number}": {"type": "number"}}))
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
    other.compile_blocking(schema_spec({"type": "boolean"}))
    pids = other.worker_pids
    other.close()
    other.close()
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(Overloaded):
        other.compile_blocking(schema_spec({"type": "boolean"}))


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
            compiled = pool.compile_blocking(schema_spec(closed({f"key{number}": each})))
            store.open(compiled, vocabulary())
            if number in (300, 999):
                status = Path(f"/proc/{pool.worker_pids[0]}/statm").read_text().split()
                sizes.append(int(status[1]) * os.sysconf("SC_PAGE_SIZE"))
        assert pool.stats.cache_bytes <= 1 << 20
        assert store.num_bytes <= 1 << 20
        assert sizes[1] - sizes[0] < 100 << 20
    finally:
        pool.close()
