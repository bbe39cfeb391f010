"""Scales in two levels, as K-quants store them: a small whole number times a factor of its block.

Such a scale has up to 19 bits and would need fp32, twice what the two levels take. Nothing but the
products comes with a weight, so the levels are looked for; any that give exactly the same products
will do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_INPUTS = 256

# What the greatest scale of a block may be: first what quantisers choose, Q4_K and Q5_K 63, Q6_K
# -128, Q2_K 15, Q3_K -32 or 31.
_USUAL = (63, -128, 15, -32, 31)
_GREATEST = (*_USUAL, *(n for n in range(127, 0, -1) if n not in _USUAL))
_TRIAL_ROWS = 16


def split_scales(scales: Tensor, group: int) -> tuple[Tensor, Tensor] | None:
    """Returns factors fp16 [N, blocks] and whole numbers int8 [N, groups], if there are any.

    `scales` [N, groups] in fp32 are exactly their products.
    """
    trial = _split(scales[:_TRIAL_ROWS], group)
    if trial is None:
        return None
    return trial if len(scales) <= _TRIAL_ROWS else _split(scales, group)


def join_scales(factors: Tensor, numbers: Tensor, group: int) -> Tensor:
    """The scales in fp32, [N, groups]."""
    spread = factors.float().repeat_interleave(BLOCK_INPUTS // group, dim=1)
    return spread[:, : numbers.shape[1]] * numbers.float()


def _split(scales: Tensor, group: int) -> tuple[Tensor, Tensor] | None:
    num_rows, num_groups = scales.shape
    in_block = BLOCK_INPUTS // group
    padded = functional.pad(scales, (0, -num_groups % in_block))
    blocks = padded.view(-1, in_block)
    places = blocks.abs().argmax(dim=1, keepdim=True)
    greatest = blocks.gather(1, places)[:, 0]
    factors = torch.zeros_like(greatest)
    numbers = torch.zeros_like(blocks)
    left = greatest.nonzero()[:, 0]
    for count in _GREATEST:
        if len(left) == 0:
            break
        factor = (greatest[left] / count).to(torch.float16).float()
        rounded = (blocks[left] / factor[:, None]).round().nan_to_num(0).clamp(-128, 127)
        fits = (rounded * factor[:, None] == blocks[left]).all(dim=1)
        factors[left[fits]] = factor[fits]
        numbers[left[fits]] = rounded[fits]
        left = left[~fits]
    if len(left) > 0:
        return None
    numbers = numbers.view(num_rows, -1)[:, :num_groups]
    return factors.view(num_rows, -1).to(torch.float16), numbers.to(torch.int8)
