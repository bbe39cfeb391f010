"""Formats of quantised weights: what a checkpoint has, and what the user asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.platform.errors import ModelUnsupported
from plait.platform.ops.quantized_weight import Activations, PackedQuantized, Quantized, Scales


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a weight is stored; weights of equal formats can be joined."""

    name: str  # for people: "Q4_K", "GPTQ int4"
    bits: int  # of a code as kernels read it: 4 or 8
    group: int  # inputs to a scale; 0: one scale an output
    has_minimums: bool  # else they are the scales times one zero point
    scales: Scales  # how scales and minimums can be stored without loss

    def unfilled(
        self, out_features: int, in_features: int, activations: Activations = "exact"
    ) -> PackedQuantized:
        """A packed weight of this format without its bytes."""
        return PackedQuantized(
            blob=torch.empty(0, dtype=torch.uint8),
            out_features=out_features,
            in_features=in_features,
            bits=self.bits,
            group=self.group if self.group < in_features else 0,
            scales=self.scales,
            zero_point=None if self.has_minimums else 0,
            activations=activations,
        )

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """What a weight `[..., N, K]` takes once it is packed; at most, for some K-quants."""
        *leading, out_features, in_features = shape
        packed = self.unfilled(out_features, in_features)
        return math.prod(leading) * packed.num_tiles * packed.tile_bytes


INT8 = WeightFormat(name="int8", bits=8, group=0, has_minimums=False, scales=Scales.FLOAT16)
INT4 = WeightFormat(name="int4", bits=4, group=32, has_minimums=True, scales=Scales.FLOAT16)


def check_finite(name: str, *parts: Tensor) -> None:
    """Refuse scales that are no numbers: every answer would be nothing but NaN."""
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ModelUnsupported(
            f"{name} has scales that are not finite: the file is damaged, or its quantisation "
            "went wrong; use another version of the checkpoint"
        )


def join(weights: list[Quantized]) -> Quantized:
    """Outputs of several weights of one format as one weight."""
    first = weights[0]
    return Quantized(
        codes=torch.cat([w.codes for w in weights]),
        bits=first.bits,
        group=first.group,
        scales=torch.cat([w.scales for w in weights]),
        mins=torch.cat([w.mins for w in weights]),
    )


def at_rows(weight: Quantized, rows: Tensor) -> Quantized:
    """Outputs `rows` of a weight, in that order; `rows` may have any shape."""
    return Quantized(
        codes=weight.codes[rows],
        bits=weight.bits,
        group=weight.group,
        scales=weight.scales[rows],
        mins=weight.mins[rows],
    )
