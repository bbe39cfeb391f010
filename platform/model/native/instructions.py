"""The vocabulary of layer programs: a decoder as a list of instructions over rows.

A *register* is a buffer of the step's rows, `[T, width]` in the model's dtype; register 0 holds the
embedded rows when the program starts, and the register that `Program.output` names holds the hidden
rows when it ends. An instruction reads and writes whole registers, or ranges of their columns. Each
rounds to the model's dtype where the family's own module does, so that both executors give the same
bits in fp32.

`lowering.py` makes programs, `reference.py` runs them by plain torch, `csrc/program.h` by kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plait.platform.ops.gated_activation import Activation
from plait.platform.ops.linear import PackedWeight
from plait.platform.ops.quantized_weight import PackedQuantized


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Columns of a register from `start` on, as heads that begin `stride` columns apart."""

    register: int
    start: int
    num_heads: int
    head_size: int
    stride: int = 0  # 0: head_size, side by side

    @property
    def head_stride(self) -> int:
        """Columns from the first of a head to the first of the next."""
        return self.stride or self.head_size

    @property
    def width(self) -> int:
        """Columns from the first to behind the last."""
        return (self.num_heads - 1) * self.head_stride + self.head_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearOp:
    """`output = input · weightᵀ + bias`, then the change of the rows' adapters."""

    output: int
    input: int
    weight: PackedWeight | PackedQuantized
    bias: Tensor | None = None
    leaf: int = -1  # among the leaves that adapters change; -1: they cannot
    name: str = ""  # for people


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RMSNormOp:
    """RMS norm of whole rows, as `ops.rms_norm` has it."""

    output: int
    input: int
    weight: Tensor
    eps: float
    weight_offset: float = 0.0
    round_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerNormOp:
    """Layer norm of whole rows; computed in fp32, rounded once."""

    output: int
    input: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadNormOp:
    """RMS norm of each head by itself, in place (qk-norm)."""

    heads: Columns
    weight: Tensor  # [head_size]
    eps: float
    weight_offset: float = 0.0
    round_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RopeTable:
    """Cosines and sines by position, as the family's rotary module gives them.

    `axes` tells which of three positions (time, height, width) a column goes by, where the model's
    positions are a grid's; None where there is one position.
    """

    cos: Tensor  # fp32 [positions, rotary], of values rounded as the family rounds them
    sin: Tensor  # the same
    axes: Tensor | None = None  # int32 [rotary]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RopeOp:
    """Rotate the first `rotary` values of each head, in place.

    `is_interleaved`: pairs are neighbours (0, 1), (2, 3), …; else halves (0, rotary/2), ….
    `round_products`: `x·cos` and `rotated·sin` are rounded to the dtype before they are added.
    """

    heads: Columns
    table: RopeTable
    is_interleaved: bool = False
    round_products: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionOp:
    """Write K and V of the rows into the pages, then attend: `output` `[T, Hq · v_size]`."""

    output: int
    query: Columns
    key: Columns
    value: Columns  # its head size may be smaller than the key's
    group: int  # of KV groups
    layer: int  # inside the group
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None  # fp32 [Hq]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedActivationOp:
    """`output = act(gate) · up`, where each input row holds its gates and then its ups."""

    output: int
    input: int
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActivationOp:
    """`output = act(input)`, value by value."""

    output: int
    input: int
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AddOp:
    """`output = output + scale · input`; the product is rounded first where scale is not 1."""

    output: int
    input: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaleOp:
    """`output = scale · output`."""

    output: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyOp:
    """`output = input`, or as many of its columns as the output has, from `start` on."""

    output: int
    input: int
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TapOp:
    """Rows after the first `layer` layers, copied out in a step that asks for them."""

    input: int
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AddEmbedsOp:
    """Add level `level` of the step's image embeddings to the rows of images, where it has any."""

    output: int
    level: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallOp:
    """`output = module(input)` by torch: what has no instruction, a mixture of experts say.

    The program stops there and goes on behind it.
    """

    output: int
    input: int
    module: object
    name: str


Instruction = (
    LinearOp
    | RMSNormOp
    | LayerNormOp
    | HeadNormOp
    | RopeOp
    | AttentionOp
    | GatedActivationOp
    | ActivationOp
    | AddOp
    | ScaleOp
    | CopyOp
    | TapOp
    | AddEmbedsOp
    | CallOp
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A lowered decoder."""

    widths: tuple[int, ...]  # of the registers
    code: tuple[Instruction, ...]
    output: int  # the register of hidden rows, after the final norm
