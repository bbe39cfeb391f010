"""A layer program as lines for people: each kind of layer once, and which layers are of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from plait.platform.model.native.instructions import (
    ActivationOp,
    AddEmbedsOp,
    AddOp,
    AttentionOp,
    CallOp,
    Columns,
    CopyOp,
    GatedActivationOp,
    HeadNormOp,
    Instruction,
    LayerNormOp,
    LinearOp,
    Program,
    RMSNormOp,
    RopeOp,
    ScaleOp,
    TapOp,
)
from plait.platform.model.native.lowered import Lowered
from plait.platform.ops.linear import PackedWeight


def describe(lowered: Lowered) -> tuple[str, ...]:
    """What runs, in a few lines."""
    before, layers, behind = _parts(lowered.program)
    texts = [tuple(_line(op) for op in layer) for layer in layers]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for number, text in enumerate(texts):
        kinds.setdefault(text, []).append(number)
    lines = [f"{len(lowered.program.code)} instructions; weights {_weights(lowered.program)}"]
    if lowered.prologue is not None:
        lines.append("before: embedded rows by position are added")
    lines += [f"before: {_line(op)}" for op in before]
    for text, numbers in kinds.items():
        lines.append(f"{_listed(numbers)}, {len(text)} instructions each:")
        lines += [f"  {line}" for line in text]
    lines += [f"behind: {_line(op)}" for op in behind]
    return (*lines, *_called(lowered))


def _parts(
    program: Program,
) -> tuple[list[Instruction], list[list[Instruction]], list[Instruction]]:
    """What comes before the first layer, each layer, and what comes behind; taps left out."""
    parts: list[list[Instruction]] = [[]]
    for op in program.code:
        if isinstance(op, TapOp):
            parts.append([])
        else:
            parts[-1].append(op)
    return parts[0], parts[1:-1], parts[-1]


def _called(lowered: Lowered) -> Iterator[str]:
    """Modules that torch runs; those of one reason in one line."""
    for reason, count in Counter(lowered.called.values()).items():
        first = next(name for name, why in lowered.called.items() if why == reason)
        others = f" and {count - 1} more" if count > 1 else ""
        yield f"by torch: {first}{others} ({reason})"


def _listed(numbers: Sequence[int]) -> str:
    """`layer 3`, `layers 0-29`, `layers 0, 2, 4, …`."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        return f"layers {first}-{last}"
    return f"{len(numbers)} layers ({', '.join(map(str, numbers[:6]))}{', …' * (len(numbers) > 6)})"


def _weights(program: Program) -> str:
    kinds = Counter(_kind(op.weight) for op in program.code if isinstance(op, LinearOp))
    return ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())


def _kind(weight: Any) -> str:
    if isinstance(weight, PackedWeight):
        return str(weight.dtype).removeprefix("torch.")
    groups = f" in groups of {weight.group}" if weight.group else ""
    rows = ", rows int8" if weight.activations == "int8" else ""
    return f"{weight.bits}-bit{groups}{rows}"


def _columns(heads: Columns) -> str:
    apart = f", heads {heads.stride} apart" if heads.head_stride != heads.head_size else ""
    return f"r{heads.register}[{heads.start}:{heads.start + heads.width}{apart}]"


def _line(op: Instruction) -> str:
    if isinstance(op, LinearOp):
        bias = " + bias" if op.bias is not None else ""
        name = op.name.rpartition(".")[2]
        size = f"{op.weight.in_features} → {op.weight.out_features}"
        return f"r{op.output} = {name}(r{op.input}){bias}  [{size}]"
    text = _text(op)
    if isinstance(op, HeadNormOp | RopeOp | AttentionOp | AddOp | ScaleOp | AddEmbedsOp | TapOp):
        return text  # what changes something in place says itself what
    return f"r{op.output} = {text}"


def _text(op: Any) -> str:
    if isinstance(op, RMSNormOp):
        return f"rms_norm(r{op.input})"
    if isinstance(op, LayerNormOp):
        return f"layer_norm(r{op.input})"
    if isinstance(op, HeadNormOp):
        return f"rms_norm of {op.heads.num_heads} × {op.heads.head_size} in {_columns(op.heads)}"
    if isinstance(op, RopeOp):
        how = " in neighbours" if op.is_interleaved else ""
        part = f"{op.table.cos.shape[1]} of {op.heads.head_size}"
        return f"rope of {op.heads.num_heads} × {part}{how} in {_columns(op.heads)}"
    if isinstance(op, AttentionOp):
        window = f", window {op.window}" if op.window else ""
        cap = f", soft cap {op.softcap:g}" if op.softcap else ""
        sinks = ", sinks" if op.sinks is not None else ""
        heads = f"{op.query.num_heads} heads over {op.key.num_heads}"
        return (
            f"r{op.output} = attention({_columns(op.query)}, {_columns(op.key)}, "
            f"{_columns(op.value)}), {heads}{window}{cap}{sinks}"
        )
    if isinstance(op, GatedActivationOp):
        return f"{op.activation}(gates) · ups of r{op.input}"
    if isinstance(op, ActivationOp):
        return f"{op.activation}(r{op.input})"
    if isinstance(op, AddOp):
        return f"r{op.output} += {f'{op.scale:g} · ' if op.scale != 1.0 else ''}r{op.input}"
    if isinstance(op, ScaleOp):
        return f"r{op.output} *= {op.scale:g}"
    if isinstance(op, CopyOp):
        return f"r{op.input}[{op.start}:]" if op.start else f"r{op.input}"
    if isinstance(op, AddEmbedsOp):
        return f"r{op.output} += level {op.level} of images"
    assert isinstance(op, CallOp)
    return f"{op.name.rpartition('.')[2]}(r{op.input}) by torch"
