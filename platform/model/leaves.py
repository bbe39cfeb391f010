"""The leaves that stand in a transformers module tree in the place of its own.

A leaf is born empty (its shape is known, its weight is not): run on meta tensors it answers with
meta tensors, which is how a model is probed before a byte of its weights is read. `set_weight`
packs what the loader brings, numbers or codes; nothing keeps the unpacked tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.platform.model.adapter_step import NO_ADAPTERS, LeafStep
from plait.platform.model.elementwise import RouterLogits
from plait.platform.model.weight_format import join
from plait.platform.ops.layer_norm import layer_norm
from plait.platform.ops.linear import PackedWeight, linear, pack_linear
from plait.platform.ops.packed_rows import packed_rows
from plait.platform.ops.quantized_weight import (
    Activations,
    PackedQuantized,
    Quantized,
    pack_quantized,
)
from plait.platform.ops.rms_norm import rms_norm

Packed = PackedWeight | PackedQuantized


def pack(weight: Tensor | Quantized, activations: Activations) -> Packed:
    """Pack a weight `[N, K]` as it comes; `activations` matters to codes alone."""
    if isinstance(weight, Quantized):
        return pack_quantized(weight, activations=activations)
    return pack_linear(weight)


class Linear(nn.Module):
    """A linear layer over a packed weight: `[..., in_features]` to `[..., out_features]`."""

    packed: Packed | None
    unfilled: Packed  # as what it will be packed
    bias: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, *, has_bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = _stand_in(out_features, in_features, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = has_bias
        self.out_dtype: torch.dtype | None = None  # None: that of the input
        self.packed = None
        self.unfilled: Packed = PackedWeight(self.weight, out_features, in_features)
        self.bias = _unfilled(self.weight[:, 0]) if has_bias else None
        self.rows_probed: set[int] = set()  # how many rows it was called with on meta tensors
        self.adapters: LeafStep = NO_ADAPTERS
        self.number = -1  # among the leaves that adapters can change

    def set_weight(self, weight: Tensor | Quantized, activations: Activations = "exact") -> None:
        """Pack `weight` `[out_features, in_features]`."""
        self.packed = pack(weight, activations)

    def set_bias(self, bias: Tensor) -> None:
        """Keep `bias` `[out_features]`."""
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Rows in, rows out; the result of a row never depends on the other rows."""
        if self.packed is None:
            self.rows_probed.add(x.shape[:-1].numel())
            shape = (*x.shape[:-1], self.out_features)
            return torch.empty(shape, dtype=self.out_dtype or x.dtype, device="meta")
        out = linear(x, self.packed, self.bias, out_dtype=self.out_dtype)
        if self.adapters.segments is not None:
            return self.adapters.change(out, x, self.number)
        return out


def _stand_in(out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """What a family's code finds as a leaf's `weight`: shape and dtype, but no values."""
    return _unfilled(torch.empty((out_features, in_features), dtype=dtype, device="meta"))


def _unfilled(weight: Tensor) -> Tensor:
    """Mark a meta tensor, so that transformers' initialisation leaves it alone."""
    weight._is_hf_initialized = True  # type: ignore[attr-defined]
    return weight


class MergedLinear:
    """Sibling linears of one input, computed as one product.

    The first sibling that is called computes all; the others, called with the same input object,
    are handed their columns. A sibling called with another input computes afresh, so the merge is
    right whatever the parent's forward does. Not a module: it has no place of its own in the tree.
    """

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...], leaf: Linear) -> None:
        self.names = names
        self.leaf = leaf
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.rows = tuple((end - size, end) for size, end in zip(sizes, ends, strict=True))
        self.num_repeats = 0  # calls with an input other than the first one's, ever
        self._input: Tensor | None = None
        self._version = 0
        self._slices: list[Tensor | None] = []
        self._weights: dict[int, Tensor | Quantized] = {}
        self._biases: dict[int, Tensor] = {}

    def take(self, part: int, x: Tensor) -> Tensor:
        """Columns of sibling `part` for input `x`; a view of the merged result."""
        if self._input is x and not self._changed(x):
            found = self._slices[part]
            if found is not None:
                self._slices[part] = None
                if not any(s is not None for s in self._slices):
                    self._input = None
                return found
        elif self._input is not None:
            self.num_repeats += 1
        merged = self.leaf(x)
        self._slices = [merged[..., start:end] for start, end in self.rows]
        taken, self._slices[part] = self._slices[part], None
        self._input = x
        self._version = x._version if x.is_meta else 0
        assert taken is not None
        return taken

    def _changed(self, x: Tensor) -> bool:
        """Was `x` written to in between? Asked while probing; a family's forward does not vary."""
        return x.is_meta and x._version != self._version

    @property
    def drained(self) -> bool:
        """Whether every sibling took its columns."""
        return self._input is None

    def release(self) -> None:
        """Let go of anything kept from an unfinished round."""
        self._input = None
        self._slices = []

    def set_weight(
        self, part: int, weight: Tensor | Quantized, activations: Activations = "exact"
    ) -> None:
        """Keep the part until all are there, then pack them together. All are of one format."""
        self._weights[part] = weight
        if len(self._weights) < len(self.rows):
            return
        parts = [self._weights.pop(i) for i in range(len(self.rows))]
        codes = [w for w in parts if isinstance(w, Quantized)]
        numbers = [w for w in parts if isinstance(w, Tensor)]
        self.leaf.set_weight(join(codes) if codes else torch.cat(numbers), activations)

    def set_bias(self, part: int, bias: Tensor) -> None:
        """Keep the part until all are there, then join them."""
        self._biases[part] = bias
        if len(self._biases) == len(self.rows):
            self.leaf.set_bias(torch.cat([self._biases.pop(i) for i in range(len(self.rows))]))


class LinearSlice(nn.Module):
    """Stands where a merged linear stood."""

    def __init__(self, owner: MergedLinear, part: int) -> None:
        super().__init__()
        self.owner = owner
        self.part = part
        self.in_features = owner.leaf.in_features
        self.out_features = owner.rows[part][1] - owner.rows[part][0]
        self.weight = _stand_in(self.out_features, self.in_features, owner.leaf.weight.dtype)
        self.bias = _unfilled(self.weight[:, 0]) if owner.leaf.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """This sibling's columns of the merged product."""
        return self.owner.take(self.part, x)


class RMSNorm(nn.Module):
    """RMS norm over the last dimension; `ops.rms_norm` tells what the options mean."""

    weight: Tensor

    def __init__(
        self, weight: nn.Parameter, eps: float, *, weight_offset: float, round_first: bool
    ) -> None:
        super().__init__()
        # Neither parameter nor buffer: plain attributes are found without a detour at every call.
        self.weight = _unfilled(weight.detach())
        self.eps = eps
        self.weight_offset = weight_offset
        self.round_first = round_first

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row of `x`."""
        if x.is_meta:
            return torch.empty_like(x)
        return rms_norm(
            x,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            round_first=self.round_first,
        )


class HasPacked(Protocol):
    """Whatever owns a packed weight: a head, or the embedding's own `Rows`."""

    packed: Packed | None


class Rows:
    """A packed weight that only ever gives rows."""

    def __init__(self, packed: Packed) -> None:
        self.packed: Packed | None = packed


class LayerNorm(nn.LayerNorm):
    """torch's layer norm by our kernel, so that both executors give the same bits."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise each row."""
        if input.is_meta or input.dtype not in (torch.float32, torch.bfloat16):
            return super().forward(input)
        return layer_norm(input, self.weight, self.bias, self.eps)


class PackedTable(Tensor):
    """An embedding's weight whose rows are read from a packed weight, the head's where it is tied.

    The tensor itself lies on the meta device and costs nothing; `F.embedding` over it gathers from
    the owner, so that a tied weight exists once and the embedding module keeps its own forward.
    """

    owner: HasPacked

    @classmethod
    def of(cls, owner: HasPacked, meta: Tensor) -> PackedTable:
        """The table of `owner`'s rows, with the shape and dtype of `meta`."""
        table = meta.detach().to("meta").as_subclass(cls)
        table.owner = owner
        return table

    def rows(self, token_ids: Tensor) -> Tensor:
        """Rows `[..., D]` of tokens `[...]`."""
        packed = self.owner.packed
        assert packed is not None
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.dtype
        rows = packed_rows(packed, token_ids.reshape(-1), dtype)
        return rows.view(*token_ids.shape, -1)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer `F.embedding` with rows of the owner; everything else sees a meta tensor."""
        if func is nn.functional.embedding and isinstance(args[1], cls):
            return args[1].rows(args[0])
        return super().__torch_function__(func, types, args, kwargs)


class RowWiseWeight(Tensor):
    """A bare weight that some module multiplies with itself: routers, and Gemma 3's projector.

    `F.linear(x, weight)` and `torch.matmul(x, weight)` over it go through our batch-invariant
    product instead of the platform's GEMM, whose summation order, and so a row's bits, depend on
    the number of rows.
    """

    packed: PackedWeight | None = None
    packed_transposed: PackedWeight | None = None
    casts: dict[torch.dtype, RowWiseWeight] | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Route `F.linear`, and casts that precede it; everything else sees a plain tensor."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear and len(args) >= 2 and isinstance(args[1], cls):
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                return args[1].product(args[0], bias)
            if func is torch.matmul and len(args) == 2 and isinstance(args[1], cls):
                return args[1].transposed_product(args[0])
            if func in _CASTS and isinstance(args[0], cls):
                return args[0].cast_to(func(*args, **kwargs))
            return func(*args, **kwargs)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ self.T + bias`, row by row."""
        if self.is_meta or x.is_meta:
            return x.new_empty((*x.shape[:-1], self.shape[0]), device="meta")
        if self.packed is None:
            self.packed = pack_linear(self.detach().as_subclass(Tensor))
        return linear(x, self.packed, bias).as_subclass(RouterLogits)

    def transposed_product(self, x: Tensor) -> Tensor:
        """`x @ self`, row by row."""
        if self.is_meta or x.is_meta:
            return x.new_empty((*x.shape[:-1], self.shape[1]), device="meta")
        if self.packed_transposed is None:
            weight = self.detach().as_subclass(Tensor)
            self.packed_transposed = pack_linear(weight.t().contiguous())
        return linear(x, self.packed_transposed)

    def cast_to(self, result: Tensor) -> Tensor:
        """The same weight in `result`'s dtype, kept for the next step."""
        if result.is_meta or result.dtype == self.dtype:
            return self
        self.casts = self.casts or {}
        if result.dtype not in self.casts:
            self.casts[result.dtype] = result.as_subclass(RowWiseWeight)
        return self.casts[result.dtype]


_CASTS = (Tensor.float, Tensor.type, Tensor.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the linear of a transformers name went: rows `start:end` of `leaf`'s weight."""

    leaf: Linear
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Leaves:
    """All replaced leaves of one model, by their transformers names."""

    sites: dict[str, Site] = field(default_factory=dict)
    merged: list[MergedLinear] = field(default_factory=list)
    transposed: set[str] = field(default_factory=set)  # stored [in, out], as GPT-2 does
    num_norms: int = 0
    num_mlps: int = 0

    def release(self) -> None:
        """Drop what merged leaves still hold of a step."""
        for owner in self.merged:
            owner.release()
