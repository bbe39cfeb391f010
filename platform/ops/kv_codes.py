"""K and V in whole numbers: a head's codes, int8, and behind them their scale, fp32.

Each head of a token has a scale of its own, so what is kept of it does not depend on what stands
beside it. Half of bf16's memory, but for the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.platform.config import KV_SCALE_BYTES

MOST = 127
_SMALLEST = 1e-36  # below, 127 / size is infinite in fp32


def to_codes(rows: Tensor) -> Tensor:
    """Rows `[..., D]` as they are kept, int8 `[..., D + 4]`: x is about scale * code.

    A row that is not finite has NaN for its scale.
    """
    values = rows.float()
    size = values.abs().amax(-1, keepdim=True)
    finite = values.isfinite().all(-1, keepdim=True)
    scale = torch.where(finite, size / MOST, torch.nan)
    # `127 / size` of torch is 127 times the rounded 1 / size.
    factor = torch.where(finite & (size > _SMALLEST), torch.full_like(size, MOST) / size, 0.0)
    codes = (torch.where(finite, values, 0.0) * factor).round().to(torch.int8)
    return torch.cat([codes, scale.contiguous().view(torch.int8)], dim=-1)


def from_codes(kept: Tensor) -> Tensor:
    """The rows that `to_codes` kept, fp32 `[..., D]`."""
    scale = kept[..., -KV_SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    return kept[..., :-KV_SCALE_BYTES].float() * scale.view(torch.float32)
