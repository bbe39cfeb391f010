"""An executor without a model: logits are a hash of exactly the tokens a row can see.

It writes tokens into slots and reads each row's history back through the block tables, so a
block that is shared wrongly, freed early or overwritten gives other tokens than `expected`. What
adapters do to K and V at a position stands in the slot too, by their `kv_digest` and scale, and a
row's logits depend on the generations that are active there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING
from zlib import crc32

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
from plait.platform.ops.likeliest import likeliest

if TYPE_CHECKING:
    from plait.adapters.adapter import Adapter
    from plait.platform.batch import StepBatch
    from plait.platform.core import AdapterUse

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


def code_of(changes: Iterable[tuple[str, float]]) -> int:
    """What adapters do at a position, as a number; 0 for the base model."""
    listed = [change for change in changes if change[0]]
    return crc32(repr(listed).encode()) << 16 if listed else 0


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
        self.placed: dict[str, Adapter] = {}
        self.allocate(config.cache)

    def allocate(self, cache: CacheConfig) -> None:
        self._block_size = cache.block_size
        self._slots: list[dict[int, tuple[int, int]]] = [{} for _ in cache.groups]
        self._window = next((g.window for g in cache.groups if g.window is not None), None)

    def adapter_bytes(self, adapter: Adapter) -> int:
        return adapter.info.num_bytes // 2

    def place_adapter(self, adapter: Adapter) -> None:
        self.placed[adapter.generation] = adapter

    def remove_adapter(self, generation: str) -> None:
        del self.placed[generation]

    def _adapter_codes(self, batch: StepBatch) -> tuple[list[int], list[int]]:
        """Per row what adapters do to its K and V, and to its logits beside."""
        by_row: list[list[tuple[str, float]]] = [[] for _ in batch.token_ids]
        for segment in batch.adapter_segments:
            for row in range(segment.start, segment.end):
                by_row[row].append((segment.generation, segment.scale))
        in_kv = [
            [(self.placed[generation].info.kv_digest, scale) for generation, scale in row]
            for row in by_row
        ]
        return [code_of(row) for row in in_kv], [code_of(row) for row in by_row]

    def forward(self, batch: StepBatch, embeds: torch.Tensor | None = None) -> torch.Tensor:
        assert embeds is None
        if self.poison & set(batch.token_ids.tolist()):
            raise RuntimeError("poisoned token")
        self.num_rows += len(batch.token_ids)
        in_kv, self._in_logits = self._adapter_codes(batch)
        for slots, mapping in zip(self._slots, batch.slot_mapping, strict=True):
            for row, slot in enumerate(mapping.tolist()):
                assert slot >= self._block_size, "nothing may be written to the null block"
                token = int(batch.token_ids[row]) + in_kv[row]
                slots[slot] = (token, int(batch.positions[row]))
        self._rows: list[torch.Tensor] = []
        for span in range(len(batch.seq_lens)):
            for row in range(batch.query_start[span], batch.query_start[span + 1]):
                logits = self._row_logits(batch, span, int(batch.positions[row]))
                self._rows.append(logits.roll(self._in_logits[row] >> 16))
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

    def likeliest(self, hidden: torch.Tensor, rows: np.ndarray, num_tokens: int) -> list[int]:
        return likeliest(self.logits(hidden, rows), num_tokens)


def expected_greedy(
    prompt: list[int],
    max_tokens: int,
    window: int | None = None,
    uses: tuple[AdapterUse, ...] = (),
) -> list[int]:
    """The greedy answer to a prompt, from the definition; ends at EOS."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        history = []
        for position, token in enumerate(tokens):
            active = [use for use in uses if use.active_from <= position]
            history.append(token + code_of((use.kv_digest, use.scale) for use in active))
        seen = None if window is None else history[-window:]
        logits = logits_after(history, seen)
        logits = logits.roll(code_of((use.generation, use.scale) for use in active) >> 16)
        tokens.append(int(logits.argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]
