"""Compiled grammars are kept in memory and on disk, within bounds."""

from __future__ import annotations

import os
import random

import pytest
from support.grammars import vocabulary
from support.schemas import closed, schema_spec

from plait.structured.cache import DiskCache, MemoryCache
from plait.structured.pool import CompilePool, PoolSettings


def test_what_one_server_compiled_another_finds_on_disk(tmp_path):
    spec = schema_spec(closed({"disk": {"type": "string"}}))
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
