"""Linear layers over packed weights, whose rows have the same bits alone and in any batch.

A matrix product of a library chooses its blocking by the number of rows, and with it the order in
which it sums: a request's numbers then depend on who else is in the batch. Here every output is one
chain of additions in the order of the inputs, whatever the rows, the blocking, the threads.
``csrc/linear.h`` tells how. Weights are packed once, to the layout that the kernels read from front
to back; the weight they came from can then be freed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from plait.platform.ops._native import has_kernels
from plait.platform.ops.huge_pages import lasting_memory
from plait.platform.ops.quantized_linear import (
    fake_quantized_linear,
    quantized_linear,
    reference_quantized_linear,
)
from plait.platform.ops.quantized_weight import PackedQuantized, check_slice
from plait.platform.ops.tile_layout import TILE_OUTPUTS

_INPUTS_PER_STEP = {torch.float32: 1, torch.bfloat16: 2}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [N, K] in tiles of 16 outputs, padded with zeros. Made by `pack_linear`."""

    tiles: Tensor  # [⌈N/16⌉, K, 16] in fp32, [⌈N/16⌉, ⌈K/2⌉, 32] in bf16: 16 pairs of inputs
    out_features: int
    in_features: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight, and of the rows it takes."""
        return self.tiles.dtype

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return self.tiles.numel() * self.tiles.element_size()

    def unpack(self) -> Tensor:
        """Returns the weight as it was, [N, K], in memory of its own."""
        width = _INPUTS_PER_STEP[self.dtype]
        num_tiles, steps, _ = self.tiles.shape
        padded = self.tiles.view(num_tiles, steps, TILE_OUTPUTS, width).transpose(1, 2)
        padded = padded.reshape(num_tiles * TILE_OUTPUTS, steps * width)
        return padded[: self.out_features, : self.in_features].contiguous()

    def slice_outputs(self, start: int, stop: int) -> PackedWeight:
        """Returns outputs start … stop - 1 as a weight that shares this one's memory.

        Raises:
            ValueError: The range is not inside the weight, or begins within a tile.
        """
        check_slice(start, stop, self.out_features)
        tiles = self.tiles[start // TILE_OUTPUTS : -(-stop // TILE_OUTPUTS)]
        return PackedWeight(tiles, stop - start, self.in_features)


def pack_linear(weight: Tensor) -> PackedWeight:
    """Packs a weight [N, K] of fp32 or bf16. The result shares no memory with it.

    Raises:
        TypeError: The weight is of another dtype.
        ValueError: It is not a matrix, or takes no inputs.
    """
    width = _INPUTS_PER_STEP.get(weight.dtype)
    if width is None:
        raise TypeError(f"linear: weights must be float32 or bfloat16, not {weight.dtype}")
    if weight.dim() != 2 or weight.shape[1] == 0:
        raise ValueError(f"linear: a weight must be [N, K] with K > 0, not {list(weight.shape)}")
    out_features, in_features = weight.shape
    num_tiles = -(-out_features // TILE_OUTPUTS)
    steps = -(-in_features // width)
    padding = (0, steps * width - in_features, 0, num_tiles * TILE_OUTPUTS - out_features)
    weight = weight.detach()
    padded = functional.pad(weight, padding) if any(padding) else weight
    tiles = padded.reshape(num_tiles, TILE_OUTPUTS, steps, width).transpose(1, 2)
    shape = (num_tiles, steps, TILE_OUTPUTS * width)
    if weight.device.type == "cpu":
        memory = lasting_memory(math.prod(shape) * weight.dtype.itemsize)
        packed = memory.view(weight.dtype).view(shape)
    else:
        packed = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    packed.view(num_tiles, steps, TILE_OUTPUTS, width).copy_(tiles)
    return PackedWeight(packed, out_features, in_features)


def linear(
    x: Tensor,
    packed: PackedWeight | PackedQuantized,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns x · weightᵀ + bias, [..., N], rounded once, to `out_dtype`.

    Args:
        x: [..., K] of the weight's dtype, fp32 or bf16 where it is quantised; rows may lie apart.
        packed: The weight [N, K].
        bias: [N], fp32 or bf16.
        out_dtype: fp32 or bf16; x's by default.

    Raises:
        TypeError: x is not of the weight's dtype.
        ValueError: x or the bias does not fit the weight.
    """
    _check(x, packed, bias)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if x.device.type != "cpu" or not _use_kernel():
        return reference_linear(x, packed, bias, out_dtype=out_dtype)
    rows = x if x.dim() == 2 else x.reshape(-1, packed.in_features)
    if rows.stride(1) != 1 or rows.stride(0) < 0:
        rows = rows.contiguous()
    if isinstance(packed, PackedQuantized):
        out = quantized_linear(rows, packed, bias, out_dtype)
    else:
        out = torch.ops.plait.linear.default(
            rows, packed.tiles, packed.in_features, packed.out_features, bias, out_dtype
        )
    return out if x.dim() == 2 else out.view(*x.shape[:-1], packed.out_features)


def reference_linear(
    x: Tensor,
    packed: PackedWeight | PackedQuantized,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` by torch's own product in fp32: right, but slow, and not the same in every batch."""
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if isinstance(packed, PackedQuantized):
        return reference_quantized_linear(x, packed, bias, out_dtype)
    wide_bias = None if bias is None else bias.float()
    return functional.linear(x.float(), packed.unpack().float(), wide_bias).to(out_dtype)


def exact_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the outputs in fp64, [T, N], and how far from them each of `linear`'s may lie.

    A chain of K additions in fp32 errs by at most K · 2⁻²⁴ of the sum of its terms' sizes (the
    products are exact inside a fused multiply-add), and the bias is one more term. The rounding to
    the output's dtype adds half a unit in the last place.
    """
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact = exact + bias.double()
        sizes = sizes + bias.double().abs()
    chain = (weight.shape[1] + 1) * 2.0**-24 * sizes + 2.0**-126
    half_unit = 2.0**-8 if out_dtype is torch.bfloat16 else 2.0**-24
    return exact, chain + half_unit * (exact.abs() + chain)


def _check(x: Tensor, packed: PackedWeight | PackedQuantized, bias: Tensor | None) -> None:
    if isinstance(packed, PackedQuantized):
        if x.dtype not in _INPUTS_PER_STEP:
            raise TypeError(f"linear: x must be float32 or bfloat16, not {x.dtype}")
    elif x.dtype != packed.dtype:
        raise TypeError(f"linear: x is {x.dtype}, the weight {packed.dtype}; convert one of them")
    if x.dim() < 1 or x.shape[-1] != packed.in_features:
        raise ValueError(
            f"linear: x is {list(x.shape)}, the weight takes {packed.in_features} inputs"
        )
    if bias is not None and bias.shape != (packed.out_features,):
        raise ValueError(
            f"linear: the bias is {list(bias.shape)}, the weight has {packed.out_features} outputs"
        )


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::linear", _fake)
    torch.library.register_fake("plait::quantized_linear", fake_quantized_linear)
    return True


def _fake(
    x: Tensor,
    packed: Tensor,
    in_features: int,
    out_features: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    del packed, in_features, bias
    return x.new_empty((x.shape[0], out_features), dtype=out_dtype)
