"""An EAGLE-3 head as a layer program: a pass of it is one call, and so is a round of greedy drafts.

Register 0 holds each row's embedding and, behind it, what the row before gave.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plait.platform.model.attention import GroupStep
from plait.platform.model.native.instructions import (
    AddOp,
    AttentionOp,
    Columns,
    CopyOp,
    GatedActivationOp,
    HeadNormOp,
    Instruction,
    LinearOp,
    Program,
    RMSNormOp,
    RopeOp,
    RopeTable,
)
from plait.platform.model.native.ropes import GrowingTable, rotate
from plait.platform.model.native.runner import Runner
from plait.platform.model.native.step import StepInputs
from plait.platform.ops.linear import PackedWeight

if TYPE_CHECKING:
    from plait.speculative.eagle_config import HeadConfig
    from plait.speculative.eagle_head import HeadRows
    from plait.speculative.eagle_weights import HeadWeights, Packed
    from plait.speculative.rotary import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Which threads run a program."""

    count: int = 1
    pin: SequenceOf[int] | None = None  # the core of each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Followed:
    """T rows of the target, of S sequences: where they stand, and what the target had there."""

    taps: Tensor  # [T, num_taps * D_target]; further rows are not read
    token_ids: list[int]  # [T], behind each row, of the target
    starts: list[int]  # [S], position of each one's first row
    counts: list[int]  # [S], its rows
    block_table: Tensor  # int32 [S, B]
    drafts: bool  # whether to say at once what comes next, if that can be


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Behind:
    """What the head has behind the last row of each of S sequences."""

    hidden: Tensor  # [S, D]
    # [S], the likeliest next token, of the head (-1: none), and its chance; or empty
    next: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Starts:
    """Where the drafts of S sequences begin, and how long each may become."""

    hidden: Tensor  # [S, D]: what each one's last row gave
    positions: list[int]  # [S], of the first token's row
    depths: list[int]  # [S], at least 1
    sure: list[int]  # [S], so many whatever their chances
    first_tokens: list[int]  # [S], of the head, where those of all are known; or empty
    first_chances: list[float]
    block_table: Tensor  # int32 [S, B]
    floor: float  # the chance of all of a draft, below which it ends behind these


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafted:
    """What a round gave."""

    token_ids: Tensor  # int64 [S, most], of the head; -1 behind the last
    chances: Tensor  # fp32 [S, most]
    num_forwards: int
    num_rows: int


def rope_table(rope: Rope, num_positions: int) -> GrowingTable:
    """Cosines and sines by position, filled as they are asked for."""
    frequencies, scale = rope.frequencies()
    spread = torch.cat([frequencies, frequencies])

    def turn(heads: Tensor, positions: Tensor) -> Tensor:
        angles = positions[0].float()[:, None] * spread
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return rotate(heads, cos, sin, is_interleaved=False, round_products=False)

    return GrowingTable(
        turn,
        rotary=rope.size,
        size=rope.size,
        is_interleaved=False,
        num_axes=1,
        limit=num_positions,
    )


def head_program(config: HeadConfig, weights: HeadWeights, rope: GrowingTable) -> Program:
    """The layer, up to what the row behind takes: before the final norm."""
    width, size = config.hidden_size, config.head_size
    num_q, num_kv = config.num_heads, config.num_kv_heads
    rows, x, normed, qkv, attended, gates, gated = range(7)
    table = RopeTable(cos=rope.cos, sin=rope.sin)

    def heads(first: int, count: int) -> Columns:
        return Columns(register=qkv, start=first * size, num_heads=count, head_size=size)

    def norm_half(half: int, weight: Tensor) -> Instruction:
        whole = Columns(register=rows, start=half * width, num_heads=1, head_size=width)
        return HeadNormOp(heads=whole, weight=weight, eps=config.eps, round_first=True)

    def norm_heads(part: Columns, weight: Tensor | None) -> list[Instruction]:
        if weight is None:
            return []
        return [HeadNormOp(heads=part, weight=weight, eps=config.eps, round_first=True)]

    query, key, value = heads(0, num_q), heads(num_q, num_kv), heads(num_q + num_kv, num_kv)
    residual: list[Instruction] = [CopyOp(output=x, input=rows, start=width)]
    norms = [norm_half(0, weights.embed_norm), norm_half(1, weights.hidden_norm)]
    code = (
        *(norms + residual if config.norm_before_residual else residual + norms),
        LinearOp(
            output=qkv, input=rows, weight=weights.qkv, bias=weights.qkv_bias, name="draft.qkv_proj"
        ),
        *norm_heads(query, weights.q_norm),
        *norm_heads(key, weights.k_norm),
        RopeOp(heads=query, table=table, round_products=False),
        RopeOp(heads=key, table=table, round_products=False),
        AttentionOp(
            output=attended, query=query, key=key, value=value, group=0, layer=0, scale=size**-0.5
        ),
        LinearOp(
            output=normed, input=attended, weight=weights.o, bias=weights.o_bias,
            name="draft.o_proj",
        ),
        AddOp(output=x, input=normed),
        RMSNormOp(
            output=normed, input=x, weight=weights.mlp_norm, eps=config.eps, round_first=True
        ),
        LinearOp(output=gates, input=normed, weight=weights.gate_up, name="draft.gate_up_proj"),
        GatedActivationOp(output=gated, input=gates, activation=config.activation),
        LinearOp(output=normed, input=gated, weight=weights.down, name="draft.down_proj"),
        AddOp(output=x, input=normed),
    )  # fmt: skip
    widths = (
        2 * width, width, width, (num_q + 2 * num_kv) * size, num_q * size,
        2 * config.intermediate_size, config.intermediate_size,
    )  # fmt: skip
    return Program(widths=widths, code=code, output=x)


class HeadRunner:
    """Runs a head by kernels. Use by one thread."""

    def __init__(
        self,
        config: HeadConfig,
        weights: HeadWeights,
        rope: GrowingTable,
        *,
        embeddings: Tensor | None,
        threads: Threads,
    ) -> None:
        """`embeddings`: rows `[N, D]` of the head's own tokens; None: no rounds in one call."""
        self._config, self._weights, self._rope = config, weights, rope
        self._runner = Runner(
            head_program(config, weights, rope),
            dtype=weights.norm.dtype,
            num_threads=threads.count,
            pin=threads.pin,
        )
        self._embeddings = embeddings
        self._handle = 0
        self._follow = torch.ops.plait.draft_follow.default
        self._round = torch.ops.plait.draft_round.default

    def allocated(self, pages: Tensor) -> None:
        """Its pages are there; comes before all else, and once."""
        weights = self._weights
        self._pages = pages
        self._handle = torch.ops.plait.draft_head_new(
            self._runner.handle,
            pages,
            self._embeddings,
            weights.input_norm,
            *_operands(weights.fc),
            weights.norm,
            self._config.eps,
            *_operands(weights.lm_head),
        )
        weakref.finalize(self, torch.ops.plait.draft_head_free.default, self._handle)

    @property
    def num_bytes(self) -> int:
        """What it holds beside the weights."""
        own = self._embeddings
        return 0 if own is None or own is self._weights.embed else own.nbytes

    @property
    def embeddings(self) -> Tensor | None:
        """Rows `[N, D]` of the head's own tokens; without them `draft` cannot be asked."""
        return self._embeddings

    def forward(self, embeds: Tensor, rows: HeadRows) -> Tensor:
        """See `EagleHead.forward`; `embeds` are the rows of its tokens."""
        self._rope.fill(1 + int(rows.positions.numpy().max()))
        group = GroupStep(self._pages, rows.slot_mapping, rows.block_table)
        step = StepInputs(
            positions=rows.positions,
            query_start=rows.query_start,
            seq_lens=rows.seq_lens,
            groups=[group],
            ranges=None,
            lora=None,
            embeds=None,
            image_rows=None,
        )
        return self._runner.run(torch.cat([embeds, rows.hidden], dim=1), step)

    def follow(self, rows: Followed, tokens: list[int], embeddings: Tensor | None) -> Behind:
        """See `EagleHead.follow`; `tokens` are rows of `embeddings`, or of the head's own."""
        self._rope.fill(max(map(operator.add, rows.starts, rows.counts)))
        hidden, following = self._follow(
            self._handle,
            rows.taps,
            tokens,
            rows.starts,
            rows.counts,
            rows.block_table,
            embeddings,
            rows.drafts,
        )
        found = following.tolist() if rows.drafts else []
        return Behind(hidden=hidden, next=[(int(token), chance) for token, chance in found])

    def draft(self, starts: Starts) -> Drafted:
        """The likeliest tokens, one behind the other; K and V of their rows are written."""
        self._rope.fill(max(map(operator.add, starts.positions, starts.depths)))
        token_ids, chances, counts = self._round(
            self._handle,
            starts.hidden,
            starts.positions,
            starts.depths,
            starts.sure,
            starts.first_tokens,
            starts.first_chances,
            starts.floor,
            starts.block_table,
        )
        num_forwards, num_rows = counts.tolist()
        return Drafted(
            token_ids=token_ids, chances=chances, num_forwards=num_forwards, num_rows=num_rows
        )


def _operands(weight: Packed) -> tuple[Tensor, list[int]]:
    """A weight, and how the kernels are told what it is."""
    if isinstance(weight, PackedWeight):
        return weight.tiles, [weight.in_features, weight.out_features]
    return weight.blob, [*weight.form, int(weight.activations == "exact")]
