"""How a tile of a packed quantised weight lies in memory, see ``csrc/quantized_weight.h``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from plait.platform.ops.two_level_scales import BLOCK_INPUTS

TILE_OUTPUTS = 16
STEP_INPUTS = 4  # of one output that lie together, as the dot instructions take them
_LINE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLayout:
    """A tile is units of a few headers and their codes; the last one may have fewer codes.

    A header, or span, is for a group of inputs, or for a block whose scales share factors.
    """

    inputs: int  # that codes are stored for, in whole groups
    bits: int
    group: int  # 0: all inputs
    planes: int  # scales, and minimums where they are stored
    value_bytes: int
    has_factors: bool

    @property
    def span_inputs(self) -> int:
        """What a header is for."""
        return BLOCK_INPUTS if self.has_factors else self.group or self.inputs

    @property
    def span_groups(self) -> int:
        """Groups in that."""
        return self.span_inputs // self.group if self.group else 1

    @property
    def num_spans(self) -> int:
        """Headers that hold values."""
        return -(-self.inputs // self.span_inputs)

    @property
    def factor_bytes(self) -> int:
        """What a header begins with: the factors of its block."""
        return 2 * TILE_OUTPUTS * self.planes if self.has_factors else 0

    @property
    def span_bytes(self) -> int:
        """What a header takes."""
        return self.factor_bytes + self.span_groups * self.planes * TILE_OUTPUTS * self.value_bytes

    @property
    def unit_spans(self) -> int:
        """How many headers lie together, so that they fill whole lines."""
        return 2 if self.group and self.span_bytes % _LINE_BYTES else 1

    @property
    def num_units(self) -> int:
        """Units of a tile, with the last one."""
        return -(-self.num_spans // self.unit_spans)

    @property
    def tile_bytes(self) -> int:
        """What a tile takes."""
        return self.num_units * self._header_bytes + self._code_bytes(self.inputs)

    def units(self, blob: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of tiles' headers and codes: those of whole units, then those of the last.

        Headers are [tiles, units, unit_spans, span_bytes], codes [tiles, units, lines, 16, 4].
        """
        tiles = blob.view(-1, self.tile_bytes)
        unit_inputs = self.unit_spans * self.span_inputs
        whole, rest = divmod(self.inputs, unit_inputs)
        start = 0
        for count, inputs in ((whole, unit_inputs), (1, rest)):
            if count == 0 or inputs == 0:
                continue
            size = self._header_bytes + self._code_bytes(inputs)
            units = tiles[:, start : start + count * size].unflatten(1, (count, size))
            headers = units[:, :, : self.unit_spans * self.span_bytes]
            codes = units[:, :, self._header_bytes :]
            yield (
                headers.unflatten(2, (self.unit_spans, self.span_bytes)),
                codes.unflatten(2, (-1, TILE_OUTPUTS, STEP_INPUTS)),
            )
            start += count * size

    @property
    def _header_bytes(self) -> int:
        return -(-self.unit_spans * self.span_bytes // _LINE_BYTES) * _LINE_BYTES

    def _code_bytes(self, inputs: int) -> int:
        return TILE_OUTPUTS * inputs * self.bits // 8
