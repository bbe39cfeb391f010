"""The arithmetic of an EAGLE-3 head: one decoder layer over the target's hidden rows.

A row of the head stands at a position i and is a pair: what the target had between its layers at
i, and the token that follows at i + 1. It predicts the token at i + 2.

    first row of a draft    g = fc(taps of the target at i)
    rows behind it          g = what the layer gave for the row before (before the final norm)

    residual = g (or its norm, where norm_before_residual)
    x = residual + attention([norm(embedding of the token), norm(g)]), over its own K and V
    x = x + mlp(norm(x))
    logits = lm_head(norm(x)), of the head's own, often shorter vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from plait.adapters.sites import SiteKind
from plait.platform.config import CacheConfig, KVGroup
from plait.platform.errors import ModelUnsupported
from plait.platform.kv.pages import DTYPES, create_pages
from plait.platform.model.native.ropes import rotate
from plait.platform.ops._native import has_kernels
from plait.platform.ops.gated_activation import gated_activation
from plait.platform.ops.kv_write import kv_write
from plait.platform.ops.linear import linear
from plait.platform.ops.paged_attention import paged_attention
from plait.platform.ops.rms_norm import rms_norm
from plait.speculative.eagle_config import HeadConfig, read_head_config
from plait.speculative.eagle_program import (
    Behind,
    Drafted,
    Followed,
    HeadRunner,
    Starts,
    Threads,
    rope_table,
)
from plait.speculative.eagle_weights import HeadWeights, Kept, load_weights

if TYPE_CHECKING:
    from plait.platform.executor import Executor

_MAX_EMBEDDING_BYTES = 64 << 20  # of a head's own tokens, kept for whole rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Rows of one pass; fields as in `StepBatch`."""

    hidden: Tensor  # [T, D] of the head
    token_ids: Tensor  # int64 [T]: the token behind each position
    positions: Tensor  # int64 [T]
    query_start: Tensor  # int32 [S+1]
    seq_lens: Tensor  # int32 [S]
    slot_mapping: Tensor  # int64 [T]
    block_table: Tensor  # int32 [S, B]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTarget:
    """What a head has to know of the model that it drafts for."""

    taps: tuple[int, ...]
    kv_dtype: str
    num_positions: int
    embed: Callable[[Tensor], Tensor]
    threads: Threads | None  # those that run it as a program; None: torch computes it


class EagleHead:
    """One head and its pages, tied to the target whose hidden rows it was trained on."""

    def __init__(self, config: HeadConfig, weights: HeadWeights, target: HeadTarget) -> None:
        self.config = config
        self.taps = target.taps  # for `Executor.forward_tapped`
        self.weight_bytes = weights.num_bytes
        self.kv_group = KVGroup(
            layers=(0,),
            window=None,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
        )
        self._weights = weights
        self._kv_dtype = target.kv_dtype
        self._embed = target.embed
        self._rope = rope_table(config.rope, target.num_positions)
        ids = (
            range(config.vocab_size) if weights.target_ids is None else weights.target_ids.tolist()
        )
        self._places = {token: place for place, token in enumerate(ids)}  # of tokens in our rows
        self._runner: HeadRunner | None = None
        if target.threads is not None:
            own = _own_embeddings(config, weights, target.embed)
            self._runner = HeadRunner(
                config, weights, self._rope, embeddings=own, threads=target.threads
            )
            self.weight_bytes += self._runner.num_bytes
        self._pages: Tensor | None = None

    @property
    def target_ids(self) -> Tensor | None:
        """The target's id of each of the head's tokens, int64; None: they are the same."""
        return self._weights.target_ids

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Create the pages."""
        group = KVGroup(
            layers=(0,),
            window=None,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            num_blocks=num_blocks,
        )
        cache = CacheConfig(
            block_size=block_size,
            groups=(group,),
            dtype=self._kv_dtype,
            enable_prefix_caching=False,
        )
        (self._pages,) = create_pages(cache)
        if self._runner is not None:
            self._runner.allocated(self._pages)

    def follow(self, rows: Followed) -> Behind:
        """What the layer gives for the last row of each sequence; K and V are written."""
        if self._runner is None:
            return Behind(hidden=self._follow_by_torch(rows), next=[])
        if self._runner.embeddings is not None:
            places = [self._places.get(token, -1) for token in rows.token_ids]
            if -1 not in places:  # as nearly always
                return self._runner.follow(rows, places, None)
        embeds = self._embed(torch.tensor(rows.token_ids))
        return self._runner.follow(rows, list(range(len(embeds))), embeds)

    @torch.inference_mode()
    def _follow_by_torch(self, rows: Followed) -> Tensor:
        assert self._pages is not None, "allocate comes first"
        size = self._pages.shape[-2]
        spans = list(zip(rows.starts, rows.counts, strict=True))
        positions = torch.cat([torch.arange(start, start + count) for start, count in spans])
        counts = torch.tensor(rows.counts)
        owners = torch.arange(len(spans)).repeat_interleave(counts)
        blocks = rows.block_table[owners, positions // size].long()
        ends = counts.cumsum(0)
        hidden = self.forward(
            HeadRows(
                hidden=self._fuse(rows.taps[: len(positions)]),
                token_ids=torch.tensor(rows.token_ids),
                positions=positions,
                query_start=functional.pad(ends, (1, 0)).int(),
                seq_lens=torch.tensor(rows.starts, dtype=torch.int32) + counts.int(),
                slot_mapping=blocks * size + positions % size,
                block_table=rows.block_table,
            )
        )
        return hidden[ends - 1]

    def _fuse(self, taps: Tensor) -> Tensor:
        """Tapped rows as the head's layer takes them, `[T, D]`."""
        w = self._weights
        if w.input_norm is not None:
            taps = rms_norm(taps, w.input_norm, self.config.eps)
        return linear(taps, w.fc)

    @torch.inference_mode()
    def forward(self, rows: HeadRows) -> Tensor:
        """What the layer gives for each row, `[T, D]`, before the final norm; K and V are written.

        It is what the row behind it takes in a draft.
        """
        w, eps = self._weights, self.config.eps
        embeds = self._embed(rows.token_ids)
        if self._runner is not None:
            assert self._pages is not None, "allocate comes first"
            return self._runner.forward(embeds, rows)
        embeds = rms_norm(embeds, w.embed_norm, eps)
        normed = rms_norm(rows.hidden, w.hidden_norm, eps)
        residual = normed if self.config.norm_before_residual else rows.hidden
        x = residual + self._attend(torch.cat([embeds, normed], dim=1), rows)
        gates = linear(rms_norm(x, w.mlp_norm, eps), w.gate_up)
        return x + linear(gated_activation(gates, self.config.activation), w.down)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[R, draft_vocab_size]` fp32 of rows that `forward` gave."""
        w = self._weights
        normed = rms_norm(hidden, w.norm, self.config.eps)
        return linear(normed, w.lm_head, out_dtype=torch.float32)

    @property
    def drafts_greedily(self) -> bool:
        """Whether `draft` can be asked."""
        return self._runner is not None and self._runner.embeddings is not None

    def draft(self, starts: Starts) -> Drafted:
        """A whole round: the likeliest tokens, one behind the other, as the head numbers them."""
        assert self._runner is not None, "ask `drafts_greedily` first"
        assert self._pages is not None, "allocate comes first"
        return self._runner.draft(starts)

    def _attend(self, x: Tensor, rows: HeadRows) -> Tensor:
        w, config, pages = self._weights, self.config, self._pages
        assert pages is not None, "allocate comes first"
        num_heads, num_kv, size = config.num_heads, config.num_kv_heads, config.head_size
        qkv = linear(x, w.qkv, w.qkv_bias).view(len(x), -1, size)
        rotated, value = qkv[:, :-num_kv], qkv[:, -num_kv:]
        if w.q_norm is not None and w.k_norm is not None:
            query, key = rotated[:, :num_heads], rotated[:, num_heads:]
            query, key = rms_norm(query, w.q_norm, config.eps), rms_norm(key, w.k_norm, config.eps)
            rotated = torch.cat([query, key], dim=1)
        self._rope.fill(1 + int(rows.positions.max()))
        cos, sin = self._rope.cos[rows.positions], self._rope.sin[rows.positions]
        rotated = rotate(
            rotated.transpose(0, 1), cos, sin, is_interleaved=False, round_products=False
        ).transpose(0, 1)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        kv_write(pages, 0, key, value, rows.slot_mapping)
        out = paged_attention(
            query,
            pages,
            0,
            rows.block_table,
            rows.query_start,
            rows.seq_lens,
            scale=size**-0.5,
        )
        return linear(out.flatten(1), w.o, w.o_bias)


Recall = Callable[[Callable[[], HeadWeights]], HeadWeights]


def load_head(
    directory: Path,
    executor: Executor,
    kept: Kept | None = None,
    threads: Threads = Threads(),  # noqa: B008 (frozen)
    recall: Recall = lambda make: make(),
) -> EagleHead:
    """Load a head for the model of `executor`. `kept`: what its matrices are, else numbers.

    `recall` may give weights that were made before, of the same files and model. Tables that it
    does not have are the model's, and what computes the model computes it, by `threads` where that
    is a program. Raises `ModelUnsupported` where the head is not served, or was made for another
    model.
    """
    config = read_head_config(directory)
    _check_target(config, executor)
    num_layers = sum(len(group.layers) for group in executor.kv_groups)
    taps = config.taps_of(num_layers)

    def logit_rows(token_ids: Tensor | None) -> Tensor:
        _check_width(config, executor, "lm_head.weight")
        ids = torch.arange(config.vocab_size) if token_ids is None else token_ids
        return _logit_rows(executor, ids)

    dtype = DTYPES[executor.kv_dtype]
    weights = recall(lambda: load_weights(directory, config, dtype, kept or Kept(), logit_rows))
    if weights.embed is None:
        _check_width(config, executor, "embed_tokens.weight")
    embed = executor.embed if weights.embed is None else _table(weights.embed)
    is_native = executor.model.executor == "native" and has_kernels()
    target = HeadTarget(
        taps=taps,
        kv_dtype=executor.kv_dtype,
        num_positions=executor.model.context_length,
        embed=embed,
        threads=threads if is_native else None,
    )
    return EagleHead(config, weights, target)


def _own_embeddings(
    config: HeadConfig, weights: HeadWeights, embed: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Rows of the head's own tokens; None where they would take much memory."""
    ids = weights.target_ids
    if ids is None and weights.embed is not None:
        return weights.embed
    size = config.draft_vocab_size * config.hidden_size * weights.norm.itemsize
    if size > _MAX_EMBEDDING_BYTES:
        return None
    return embed(torch.arange(config.vocab_size) if ids is None else ids).to(weights.norm.dtype)


def _check_width(config: HeadConfig, executor: Executor, name: str) -> None:
    if config.hidden_size != executor.hidden_size:
        raise ModelUnsupported(
            f"the draft head {config.name} has no {name} of its own, and the model's "
            f"rows have {executor.hidden_size} values where it needs {config.hidden_size}",
            param="draft_model",
        )


def _logit_rows(executor: Executor, token_ids: Tensor) -> Tensor:
    """The model's own, that make the logits of these tokens."""
    sites = executor.sites
    heads = [site for site in sites.sites.values() if site.kind is SiteKind.HEAD]
    if heads and not sites.is_tied:
        rows = executor.base_weight(heads[0])
        assert rows is not None, "a head has rows"
        return rows[token_ids]
    return executor.embed(token_ids)


def _table(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda token_ids: functional.embedding(token_ids, weight)


def _check_target(config: HeadConfig, executor: Executor) -> None:
    model = executor.model
    sizes = {
        "hidden rows of": (config.target_hidden_size, executor.hidden_size),
        "a vocabulary of": (config.vocab_size, model.vocab_size),
    }
    for what, (wanted, there) in sizes.items():
        if wanted != there:
            raise ModelUnsupported(
                f"the draft head {config.name} was made for a model with {what} {wanted}, and "
                f"{model.name} has {there}: use a head that was trained for this model",
                param="draft_model",
            )
