"""Schedulers of few blocks, what is asked of them, and what their plans hold."""

from __future__ import annotations

from plait.platform.config import CacheConfig, KVGroup, SchedulerConfig
from plait.platform.core import StepPlan
from plait.platform.scheduler import Scheduler

ENDLESS = {"ignore_eos": True}


def prompt(length: int, start: int = 1) -> list[int]:
    """Tokens that no other start gives, none of which ends an answer."""
    return [1 + (start + i) % 11 for i in range(length)]


def scheduled(plan: StepPlan) -> dict[str, int]:
    """What the plan computes: request id and index → number of rows."""
    return {f"{s.sequence.request.request_id}.{s.sequence.index}": s.num_tokens for s in plan.spans}


def groups(*sizes: tuple[int | None, int]) -> tuple[KVGroup, ...]:
    """KV groups of (window, number of usable blocks)."""
    return tuple(
        KVGroup(layers=(i,), window=window, num_kv_heads=1, head_size=1, num_blocks=blocks + 1)
        for i, (window, blocks) in enumerate(sizes)
    )


def make_scheduler(
    *sizes: tuple[int | None, int],
    block_size: int = 4,
    caching: bool = True,
    max_model_len: int = 200,
    max_num_seqs: int = 8,
    budget: int = 16,
    max_num_queued: int = 100,
    watermark: float = 0.0,
    strands: tuple = (),
) -> Scheduler:
    cache = CacheConfig(
        block_size=block_size,
        groups=groups(*sizes),
        dtype="float32",
        enable_prefix_caching=caching,
    )
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_queued=max_num_queued,
        watermark=watermark,
    )
    return Scheduler(config, cache, strands)
