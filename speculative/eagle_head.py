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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.platform.config import CacheConfig, KVGroup
from plait.platform.errors import ModelUnsupported
from plait.platform.kv.pages import DTYPES, create_pages
from plait.platform.ops.gated_activation import gated_activation
from plait.platform.ops.kv_write import kv_write
from plait.platform.ops.linear import linear
from plait.platform.ops.paged_attention import paged_attention
from plait.platform.ops.rms_norm import rms_norm
from plait.speculative.eagle_config import HeadConfig, read_head_config
from plait.speculative.eagle_weights import HeadWeights, load_weights

if TYPE_CHECKING:
    from plait.platform.executor import Executor


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


class EagleHead:
    """One head and its pages, tied to the target whose hidden rows it was trained on."""

    def __init__(
        self,
        config: HeadConfig,
        weights: HeadWeights,
        *,
        taps: tuple[int, ...],
        kv_dtype: str,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        self.config = config
        self.taps = taps  # for `Executor.forward_tapped`
        self.weight_bytes = weights.num_bytes
        self.kv_group = KVGroup(
            layers=(0,),
            window=None,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
        )
        self._weights = weights
        self._kv_dtype = kv_dtype
        self._embed = embed
        self._rope = _rope(config)
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

    @torch.inference_mode()
    def fuse(self, taps: Tensor) -> Tensor:
        """Tapped rows `[T, num_taps * D_target]` as the head's layer takes them, `[T, D]`."""
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
        embeds = rms_norm(self._embed(rows.token_ids), w.embed_norm, eps)
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

    def _attend(self, x: Tensor, rows: HeadRows) -> Tensor:
        w, config, pages = self._weights, self.config, self._pages
        assert pages is not None, "allocate comes first"
        num_heads, num_kv, size = config.num_heads, config.num_kv_heads, config.head_size
        qkv = linear(x, w.qkv, w.qkv_bias).view(len(x), -1, size)
        query, key, value = qkv[:, :num_heads], qkv[:, num_heads:-num_kv], qkv[:, -num_kv:]
        if w.q_norm is not None and w.k_norm is not None:
            query, key = (
                rms_norm(y, z, config.eps) for y, z in ((query, w.q_norm), (key, w.k_norm))
            )
        query, key = self._rope(query, key, rows.positions)
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


def load_head(directory: Path, executor: Executor) -> EagleHead:
    """Load a head for the model of `executor`.

    Raises `ModelUnsupported` where the head is not served, or was made for another model.
    """
    config = read_head_config(directory)
    _check_target(config, executor)
    num_layers = sum(len(group.layers) for group in executor.kv_groups)
    taps = config.taps_of(num_layers)
    weights = load_weights(directory, config, DTYPES[executor.kv_dtype])
    if weights.embed is None and config.hidden_size != executor.hidden_size:
        raise ModelUnsupported(
            f"the draft head {config.name} has no embed_tokens.weight of its own, and the model's "
            f"rows have {executor.hidden_size} values where it needs {config.hidden_size}",
            param="draft_model",
        )
    embed = executor.embed if weights.embed is None else _table(weights.embed)
    return EagleHead(config, weights, taps=taps, kv_dtype=executor.kv_dtype, embed=embed)


def _table(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda token_ids: torch.nn.functional.embedding(token_ids, weight)


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


def _rope(config: HeadConfig) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary: Any = LlamaRotaryEmbedding(config.layer)
    frequencies, scale = rotary.inv_freq.float(), float(rotary.attention_scaling)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=2)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, dim=2).to(x.dtype)

    def apply(query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None].float() * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return rotate(query, cos, sin), rotate(key, cos, sin)

    return apply
