"""Memory: what is chosen fits, what is asked and cannot be is refused with a value that can."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.history_executor import model_info

from plait.platform.budget import fit
from plait.platform.config import KVGroup, Options, VisionInfo
from plait.platform.errors import ConfigError
from plait.platform.kv.pages import create_pages

MODEL = replace(model_info(), context_length=8192, weight_bytes=1 << 28)
FULL = KVGroup(layers=tuple(range(30)), window=None, num_kv_heads=3, head_size=64)
WINDOW = KVGroup(layers=tuple(range(10)), window=512, num_kv_heads=3, head_size=64)
GIB = 1 << 30


def size(groups: tuple[KVGroup, ...], block_size: int = 16) -> int:
    return sum(g.num_blocks * g.bytes_per_block(block_size, 2) for g in groups)


def test_kv_in_whole_numbers_holds_nearly_twice_as_much() -> None:
    options = Options(kv_cache_bytes=GIB)
    wide = fit(options, MODEL, (FULL,), "bfloat16", 8 * GIB).cache.groups[0].num_blocks
    cache = fit(options, MODEL, (FULL,), "int8", 8 * GIB).cache
    assert cache.groups[0].num_blocks == pytest.approx(wide * 2 * 64 / (64 + 4), rel=0.001)
    assert create_pages(cache)[0].nbytes <= GIB


@given(
    available=st.integers(0, 64 * GIB),
    groups=st.sampled_from([(FULL,), (FULL, WINDOW), (WINDOW,)]),
    max_model_len=st.none() | st.integers(1, 8192),
    max_num_seqs=st.none() | st.integers(1, 300),
    utilization=st.floats(0.01, 1.0),
    adapters=st.none() | st.integers(0, 2 * GIB),
    adapters_host=st.none() | st.integers(0, 2 * GIB),
)
def test_what_is_chosen_fits(
    available: int,
    groups: tuple[KVGroup, ...],
    max_model_len: int | None,
    max_num_seqs: int | None,
    utilization: float,
    adapters: int | None,
    adapters_host: int | None,
) -> None:
    options = Options(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        memory_utilization=utilization,
        adapter_memory_bytes=adapters,
        adapter_host_bytes=adapters_host,
    )
    try:
        got = fit(options, MODEL, groups, "bfloat16", available)
    except ConfigError:
        return
    assert size(got.cache.groups) == got.kv_bytes
    assert got.kv_bytes + got.adapter_bytes <= max(available * utilization, got.adapter_bytes)
    assert got.kv_bytes + got.adapter_bytes + got.adapter_host_bytes <= available
    assert adapters is None or got.adapter_bytes == adapters
    bounds = got.scheduler
    assert bounds.max_model_len <= 8192
    assert max_model_len is None or bounds.max_model_len == max_model_len
    assert bounds.max_num_batched_tokens >= bounds.max_num_seqs
    for group in got.cache.groups:  # one sequence of full length always fits
        held = bounds.max_model_len
        if group.window is not None:
            held = min(held, group.window + bounds.max_num_batched_tokens)
        assert (group.num_blocks - 1) * 16 >= held


def test_an_impossible_length_names_a_length_that_fits() -> None:
    options = Options(max_model_len=8192)
    with pytest.raises(ConfigError, match=r"--max-model-len \d+,") as raised:
        fit(options, MODEL, (FULL,), "bfloat16", 300 << 20)
    fits = re.search(r"fits: --max-model-len (\d+)", raised.value.message)
    assert fits is not None
    got = fit(replace(options, max_model_len=int(fits[1])), MODEL, (FULL,), "bfloat16", 300 << 20)
    assert got.scheduler.max_model_len == int(fits[1])
    needed = re.search(r"--kv-cache-memory (\d+)MiB", raised.value.message)
    assert needed is not None
    asked = replace(options, kv_cache_bytes=int(needed[1]) << 20)
    assert fit(asked, MODEL, (FULL,), "bfloat16", GIB).scheduler.max_model_len == 8192


def test_a_short_context_is_no_lack_of_memory() -> None:
    assert fit(Options(max_model_len=3), MODEL, (FULL,), "bfloat16", GIB).kv_bytes > 0
    with pytest.raises(ConfigError, match="no memory is left"):
        fit(Options(), MODEL, (FULL,), "bfloat16", 1 << 20)
    too_small = r"--kv-cache-memory 1.00KiB holds no sequence: one .* takes \S+iB"
    with pytest.raises(ConfigError, match=too_small):
        fit(Options(kv_cache_bytes=1024), MODEL, (FULL,), "bfloat16", GIB)


def test_without_a_wish_the_context_shrinks_to_what_fits_and_says_so() -> None:
    got = fit(Options(), MODEL, (FULL,), "bfloat16", 300 << 20)
    assert got.scheduler.max_model_len < 8192
    assert any("does not fit" in line for line in got.arithmetic)


def test_no_more_is_taken_than_can_be_used() -> None:
    got = fit(Options(max_num_seqs=2), MODEL, (FULL,), "bfloat16", 60 * GIB)
    assert got.cache.num_tokens <= 2 * (8192 + 16)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (Options(max_model_len=10_000), "--max-model-len 8192"),
        (Options(max_num_seqs=32, max_num_batched_tokens=8), "--max-num-seqs 8"),
        (Options(kv_cache_bytes=9 * GIB), "--kv-cache-memory"),
        (Options(memory_utilization=1.5), "--memory-utilization"),
        (Options(block_size=0), "--block-size"),
        (Options(max_num_seqs=0), "--max-num-seqs"),
        (Options(adapter_memory_bytes=9 * GIB), "--adapter-memory 9.00GiB"),
        (Options(adapter_memory_bytes=GIB, kv_cache_bytes=7 * GIB), "--kv-cache-memory 7.00GiB"),
        (Options(adapter_host_bytes=9 * GIB), "--adapter-host-memory 9.00GiB"),
        (Options(adapter_memory_bytes=-1), "--adapter-memory must"),
    ],
)
def test_a_wish_that_cannot_be_names_its_flag(options: Options, flag: str) -> None:
    with pytest.raises(ConfigError) as raised:
        fit(options, MODEL, (FULL,), "bfloat16", 8 * GIB)
    assert flag in raised.value.message


def test_adapters_get_a_modest_share_that_the_arithmetic_tells() -> None:
    got = fit(Options(), MODEL, (FULL,), "bfloat16", 8 * GIB)
    assert 0 < got.adapter_bytes <= 8 * GIB // 20
    assert got.adapter_host_bytes == 4 * got.adapter_bytes
    (line,) = [line for line in got.arithmetic if line.startswith("adapters at most")]
    assert "1/20 of the budget" in line
    none = fit(Options(adapter_memory_bytes=0), MODEL, (FULL,), "bfloat16", 8 * GIB)
    assert (none.adapter_bytes, none.adapter_host_bytes) == (0, 0)
    assert any(line.startswith("no adapters") for line in none.arithmetic)


def seeing(hidden_size: int = 1024, num_levels: int = 4) -> VisionInfo:
    return VisionInfo(
        family="f",
        hidden_size=hidden_size,
        num_levels=num_levels,
        image_token_id=1,
        has_grid_positions=False,
    )


@given(
    available=st.integers(0, 64 * GIB),
    asked=st.none() | st.integers(0, 2 * GIB),
    adapters=st.none() | st.integers(0, 2 * GIB),
    kv=st.none() | st.integers(1, 8 * GIB),
)
def test_embeddings_of_images_have_their_share_of_the_one_budget(
    available: int, asked: int | None, adapters: int | None, kv: int | None
) -> None:
    model = replace(MODEL, dtype="bfloat16", vision=seeing())
    options = Options(encoder_cache_bytes=asked, adapter_memory_bytes=adapters, kv_cache_bytes=kv)
    try:
        got = fit(options, model, (FULL,), "bfloat16", available)
    except ConfigError:
        return
    taken = got.kv_bytes + got.encoder_bytes + got.adapter_bytes + got.adapter_host_bytes
    assert taken <= available
    assert got.encoder_bytes == 0 or got.encoder_bytes >= 8192
    assert asked is None or got.encoder_bytes == asked
    assert got.encoder_bytes <= 512 << 20 or asked is not None
    kinds = ("embeddings of images", "no images")
    assert sum(line.startswith(kinds) for line in got.arithmetic) == 1


def test_the_arithmetic_tells_the_largest_image_and_models_without_vision_refuse_the_flag() -> None:
    model = replace(MODEL, dtype="bfloat16", vision=seeing())
    got = fit(Options(encoder_cache_bytes=8 << 20), model, (FULL,), "bfloat16", 8 * GIB)
    (line,) = [line for line in got.arithmetic if line.startswith("embeddings of images")]
    assert "8.00MiB (asked for): 1,024 of 8.00KiB; an image that takes more is refused" in line
    for options, about in (
        (Options(encoder_cache_bytes=1 << 12), "one embedding takes 8.00KiB"),
        (Options(encoder_cache_bytes=9 * GIB), "more than is free"),
        (Options(encoder_cache_bytes=-1), "at least 0"),
    ):
        with pytest.raises(ConfigError, match="--encoder-cache-memory") as raised:
            fit(options, model, (FULL,), "bfloat16", 8 * GIB)
        assert about in raised.value.message
    text = fit(Options(encoder_cache_bytes=0), MODEL, (FULL,), "bfloat16", 8 * GIB)
    assert text.encoder_bytes == 0
    with pytest.raises(ConfigError, match="this model takes none"):
        fit(Options(encoder_cache_bytes=1), MODEL, (FULL,), "bfloat16", 8 * GIB)
