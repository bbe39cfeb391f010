"""Runs layer programs by the C++ kernels: one call a step, threads of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.platform.errors import InternalError
from plait.platform.model.native.encoding import encode
from plait.platform.model.native.instructions import CallOp, Program
from plait.platform.model.native.step import StepInputs
from plait.platform.ops._load import load_library
from plait.platform.ops.linear import PackedWeight
from plait.platform.ops.quantized_weight import PackedQuantized

SPIN_US = 60  # that a thread waits for work before it sleeps
ROW_CLASSES = ("1", "2-8", "9-32", "33+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCount:
    """What one kind of instruction took since the counters were last reset."""

    phase: str  # "qkv_proj", "attention", "rms_norm", …: the names of linears without layers
    rows: str  # of a step, one of ROW_CLASSES
    calls: int
    nanoseconds: int
    num_bytes: int  # read, of weights or of K and V
    operations: int  # two for a multiply-add

    @property
    def gb_per_s(self) -> float:
        """10⁹ bytes a second."""
        return self.num_bytes / max(1, self.nanoseconds)

    @property
    def gop_per_s(self) -> float:
        """10⁹ operations a second."""
        return self.operations / max(1, self.nanoseconds)


class Runner:
    """One program, ready to run. Its registers are kept from step to step; use by one thread."""

    def __init__(
        self,
        program: Program,
        *,
        dtype: torch.dtype,
        num_threads: int,
        pin: Sequence[int] | None = None,
        spin_us: int = SPIN_US,
    ) -> None:
        """Check and encode `program`.

        Args:
            program: Its tensors are kept alive, not copied.
            dtype: Of the registers and the pages, fp32 or bf16.
            num_threads: That compute, the caller's among them.
            pin: The core of each thread, the caller's first (bound in its first step); None:
                wherever the system puts them.
            spin_us: How long an idle thread spins before it sleeps.

        Raises:
            RuntimeError: Registers, shapes or dtypes do not fit each other; the message names the
                instruction.
        """
        load_library()
        encoded = encode(program)
        self._widths = program.widths
        self._dtype = dtype
        self.takes_tokens = False
        self._phases = (*encoded.phases, "lora")
        self._calls = [(i, op) for i, op in enumerate(program.code) if isinstance(op, CallOp)]
        self._end = len(program.code)
        self.handle: int = torch.ops.plait.program_new(
            encoded.code,
            encoded.tensors,
            "".join(f"{name}\n" for name in encoded.names),
            list(program.widths),
            program.output,
            dtype,
            num_threads,
            list(pin or ()),
            spin_us,
        )
        self._step: Callable[..., tuple[Tensor, Tensor]] = torch.ops.plait.program_step.default
        self._in_step = threading.Lock()
        self._free = weakref.finalize(self, torch.ops.plait.program_free.default, self.handle)

    def embed(self, table: PackedWeight | PackedQuantized | Tensor) -> None:
        """Let `rows` of steps be token ids `[T]`, whose rows a table `[V, D]` has, if it can."""
        if self._calls or not _fits(table, self._dtype):
            return
        form: tuple[int, ...]
        if isinstance(table, Tensor):
            weight, form = table, (table.shape[1], table.shape[0])
        elif isinstance(table, PackedWeight):
            weight, form = table.tiles, (table.in_features, table.out_features)
        else:
            weight, form = table.blob, table.form
        torch.ops.plait.program_embedding(self.handle, weight, form)
        self.takes_tokens = True

    def run(self, rows: Tensor, step: StepInputs) -> Tensor:
        """Hidden rows `[T, D]` for embedded `rows` `[T, D]`, which stay as they are, or tokens.

        K and V of the rows are written.

        Raises:
            RuntimeError: The step does not fit the program, or itself; nothing has been written.
        """
        return self._run(rows, step, ())[0]

    def run_tapped(
        self, rows: Tensor, step: StepInputs, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """`run`, and beside its rows those after so many layers, `[T, len(taps) * D]`."""
        return self._run(rows, step, taps)

    def _run(self, rows: Tensor, step: StepInputs, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if not self._in_step.acquire(blocking=False):
            raise InternalError("the program is at a step of another thread")
        try:
            return self._run_alone(rows, step, taps)
        finally:
            self._in_step.release()

    def _run_alone(
        self, rows: Tensor, step: StepInputs, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        outputs = self._step(
            self.handle,
            rows,
            step.positions,
            step.query_start,
            step.seq_lens,
            [group.pages for group in step.groups],
            [group.slot_mapping for group in step.groups],
            [group.block_table for group in step.groups],
            step.ranges,
            None if step.lora is None else step.lora.table,
            step.embeds,
            step.image_rows,
            taps,
            self._calls[0][0] if self._calls else self._end,
        )
        if not self._calls:
            return outputs
        ends = [place for place, _ in self._calls[1:]] + [self._end]
        for (place, call), end in zip(self._calls, ends, strict=False):
            self._call(call, rows)
            torch.ops.plait.program_resume(self.handle, place + 1, end)
        return outputs

    def _call(self, call: CallOp, rows: Tensor) -> None:
        """Let torch compute one instruction, over a copy of its input."""
        given = rows.new_empty((len(rows), self._widths[call.input]))
        torch.ops.plait.program_read(self.handle, call.input, given)
        module: Any = call.module
        found: Tensor = module(given)
        if found.shape != (len(rows), self._widths[call.output]) or found.dtype != rows.dtype:
            raise InternalError(f"{call.name} gave {list(found.shape)} of {found.dtype}")
        torch.ops.plait.program_write(self.handle, call.output, found.contiguous())

    def counters(self, *, reset: bool = False) -> list[PhaseCount]:
        """What the steps took so far, by kind of instruction; those that never ran are left out.

        What adapters took is the phase "lora", and not part of the linears that they change.
        """
        counts = torch.empty((len(self._phases), len(ROW_CLASSES), 4), dtype=torch.int64)
        torch.ops.plait.program_counters(self.handle, counts, reset)
        return [
            PhaseCount(
                phase=phase,
                rows=rows,
                calls=calls,
                nanoseconds=nanoseconds,
                num_bytes=num_bytes,
                operations=operations,
            )
            for phase, classes in zip(self._phases, counts.tolist(), strict=True)
            for rows, (calls, nanoseconds, num_bytes, operations) in zip(
                ROW_CLASSES, classes, strict=True
            )
            if calls
        ]

    def close(self) -> None:
        """Free registers and threads; also done when the object goes. Twice is once."""
        self._free()


def _fits(table: PackedWeight | PackedQuantized | Tensor, dtype: torch.dtype) -> bool:
    """Whether rows of a table come out in the program's dtype."""
    if isinstance(table, PackedQuantized):
        return True
    is_dense = not isinstance(table, Tensor) or (table.is_contiguous() and not table.is_meta)
    return is_dense and table.dtype == dtype
