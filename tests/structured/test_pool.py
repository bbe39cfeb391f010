"""Compiling in processes: one compile for all who ask, bounded queues, relief for what waits."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.compiling import MARGIN_S
from support.grammars import accepts, vocabulary
from support.schemas import closed, schema_spec

from plait.platform.errors import (
    BadRequest,
    InvalidSchema,
    Overloaded,
    UnsupportedSchemaKeyword,
)
from plait.structured.matcher import MatcherStore
from plait.structured.pool import CompilePool, PoolSettings


def test_what_is_compiled_works_in_the_engine(pool):
    store = MatcherStore()
    for content in (
        closed({"a": {"type": "integer"}}),
        closed({"a": {"type": "string", "maxLength": 3}}),
    ):
        compiled = pool.compile_blocking(schema_spec(content))
        text = '{"a":12}' if compiled.backend == "xgrammar" else '{"a":"日本x"}'
        assert accepts(store.open(compiled, vocabulary()), text)
    backends = {
        pool.compile_blocking(schema_spec(closed({"a": each}))).backend
        for each in ({"type": "integer"}, {"type": "string", "maxLength": 3})
    }
    assert backends == {"xgrammar", "llguidance"}


def test_refusals_are_the_routers_with_the_field_of_each_request(pool):
    bad = {"type": "object", "if": {"minProperties": 2}, "then": {"maxProperties": 4}}
    for param in ("response_format", "structured_outputs"):
        with pytest.raises(UnsupportedSchemaKeyword) as caught:
            pool.compile_blocking(schema_spec(bad, param=param))
        assert caught.value.param == param
    with pytest.raises(InvalidSchema, match="no JSON"):
        pool.compile_blocking(schema_spec({"const": object()}))
    with pytest.raises(BadRequest):
        pool.compile_blocking(schema_spec({"const": "\ud800"}))


def test_key_order_and_numbers_of_any_size_are_kept(pool):
    store = MatcherStore()
    one = pool.compile_blocking(schema_spec(closed({"a": {"type": "null"}, "b": {"type": "null"}})))
    two = pool.compile_blocking(schema_spec(closed({"b": {"type": "null"}, "a": {"type": "null"}})))
    assert accepts(store.open(two, vocabulary()), '{"b":null,"a":null}')
    assert not accepts(store.open(one, vocabulary()), '{"b":null,"a":null}')
    big = pool.compile_blocking(schema_spec({"const": 10**30}))
    assert accepts(store.open(big, vocabulary()), str(10**30))


def test_equal_requests_share_one_compile_and_then_the_cache(pool):
    spec = schema_spec(closed({"shared": {"type": "string"}}))
    before = pool.stats.counts.get("compiled", 0)

    async def run():
        return await asyncio.gather(*(pool.compile(spec) for _ in range(20)))

    compiled = asyncio.run(run())
    assert len({id(each) for each in compiled}) == 1
    assert pool.compile_blocking(spec) is compiled[0]
    assert pool.stats.counts["compiled"] == before + 1


def test_one_who_leaves_takes_the_compile_from_nobody(pool):
    spec = schema_spec(closed({"left": {"type": "string"}}))

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
                pool.compile(schema_spec(closed({f"{tenant}{number}": {}})), tenant=tenant)
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
        pool.compile_blocking(schema_spec({"type": "boolean"}))
        os.kill(at_work, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as asking:
            stuck = asking.submit(
                pool.compile_blocking, schema_spec(closed({"a": {"type": "integer"}}))
            )
            try:
                for number in range(3):
                    assert pool.compile_blocking(schema_spec(closed({f"k{number}": {}}))).payload
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
            specs = [schema_spec(closed({f"k{number}": {}})) for number in range(16)]
            assert all(each.payload for each in asking.map(pool.compile_blocking, specs))
        assert len(pool.worker_pids) <= 2
    finally:
        pool.close()
