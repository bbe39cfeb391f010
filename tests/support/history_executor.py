"""An executor without a model: logits are a hash of exactly the tokens a row can see.

It writes tokens into slots and reads each row's history back through the block tables, so a
block that is shared wrongly, freed early or overwritten gives other tokens than `expected`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.platform.config import (
    CacheConfig,
    EngineConfig,
    KVGroup,
    ModelInfo,
    Options,
    SchedulerConfig,
)

if TYPE_CHECKING:
    from plait.platform.batch import StepBatch

VOCAB_SIZE = 61
EOS = 2


def model_info() -> ModelInfo:
    return ModelInfo(
        name="history",
        architecture="HistoryForCausalLM",
        source="directory",
        dtype="float32",
        executor="history",
        vocab_size=VOCAB_SIZE,
        context_length=512,
        eos_token_ids=(EOS,),
        weight_bytes=0,
    )


def engine_config(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_num_queued: int = 1000,
    max_model_len: int = 128,
    window: int | None = None,
    prefix_caching: bool = True,
    seed: int | None = 0,
) -> EngineConfig:
    full = KVGroup(layers=(0,), window=None, num_kv_heads=1, head_size=1, num_blocks=num_blocks)
    groups = (full,)
    if window is not None:
        blocks = 1 + max_num_seqs * (-(-(window + max_num_batched_tokens) // block_size) + 2)
        groups = (
            full,
            KVGroup(layers=(1,), window=window, num_kv_heads=1, head_size=1, num_blocks=blocks),
        )
    return EngineConfig(
        options=Options(seed=seed),
        model=model_info(),
        cache=CacheConfig(
            block_size=block_size,
            groups=groups,
            dtype="float32",
            enable_prefix_caching=prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_queued=max_num_queued,
        ),
    )


def logits_after(history: list[int], window_history: list[int] | None = None) -> torch.Tensor:
    """Logits `[V]` fp32 of the token that follows `history`."""
    seen = np.asarray([*history, -1, *(window_history or [])], dtype=np.int64)
    digest = hashlib.blake2b(seen.tobytes(), digest_size=8).digest()
    values = np.random.default_rng(int.from_bytes(digest, "little")).normal(size=VOCAB_SIZE)
    return torch.from_numpy(2 * values).float()


class HistoryExecutor:
    """Implements `Executor` for one full group and at most one window group of one layer."""

    def __init__(self, config: EngineConfig) -> None:
        self.model = config.model
        self.kv_groups = config.cache.groups
        self.kv_dtype = "float32"
        self.poison: set[int] = set()  # token ids on which `forward` raises
        self.nan_on: set[int] = set()  # token ids whose row's logits are NaN
        self.num_rows = 0  # computed in all
        self.allocate(config.cache)

    def allocate(self, cache: CacheConfig) -> None:
        self._block_size = cache.block_size
        self._slots: list[dict[int, tuple[int, int]]] = [{} for _ in cache.groups]
        self._window = next((g.window for g in cache.groups if g.window is not None), None)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if self.poison & set(batch.token_ids.tolist()):
            raise RuntimeError("poisoned token")
        self.num_rows += len(batch.token_ids)
        for slots, mapping in zip(self._slots, batch.slot_mapping, strict=True):
            for row, slot in enumerate(mapping.tolist()):
                assert slot >= self._block_size, "nothing may be written to the null block"
                slots[slot] = (int(batch.token_ids[row]), int(batch.positions[row]))
        self._rows: list[torch.Tensor] = []
        for span in range(len(batch.seq_lens)):
            for row in range(batch.query_start[span], batch.query_start[span + 1]):
                self._rows.append(self._row_logits(batch, span, int(batch.positions[row])))
                if int(batch.token_ids[row]) in self.nan_on:
                    self._rows[-1] = torch.full((VOCAB_SIZE,), float("nan"))
        return torch.arange(len(self._rows), dtype=torch.float32)[:, None]

    def _row_logits(self, batch: StepBatch, span: int, position: int) -> torch.Tensor:
        full = self._read(batch, 0, span, 0, position)
        if self._window is None:
            return logits_after(full)
        first = max(0, position - self._window + 1)
        return logits_after(full, self._read(batch, 1, span, first, position))

    def _read(self, batch: StepBatch, group: int, span: int, first: int, last: int) -> list[int]:
        table = batch.block_tables[group][span]
        tokens = []
        for position in range(first, last + 1):
            block = int(table[position // self._block_size])
            assert block != 0, f"position {position} of span {span} reads the null block"
            slot = block * self._block_size + position % self._block_size
            token, stored = self._slots[group].get(slot, (-1, -1))
            assert stored == position, f"slot {slot} holds position {stored}, not {position}"
            tokens.append(token)
        return tokens

    def logits(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        if len(rows) == 0:
            return torch.empty(0, VOCAB_SIZE)
        return torch.stack([self._rows[int(hidden[row, 0])] for row in rows.tolist()])


def expected_greedy(prompt: list[int], max_tokens: int, window: int | None = None) -> list[int]:
    """The greedy answer to a prompt, from the definition; ends at EOS."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        seen = None if window is None else tokens[-window:]
        tokens.append(int(logits_after(tokens, seen).argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]
