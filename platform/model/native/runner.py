"""Runs layer programs by the C++ kernels: one call a step, threads of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.platform.model.native.instructions import Program
from plait.platform.model.native.step import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCount:
    """What one kind of instruction took since the counters were last reset."""

    phase: str  # "qkv_proj", "attention", "rms_norm", …: the names of linears without layers
    rows: str  # of a step: "1", "2-8", "9-32", "33+"
    calls: int
    nanoseconds: int
    weight_bytes: int  # read, of weights or of K and V
    operations: int  # two for a multiply-add

    @property
    def gb_per_s(self) -> float:
        """10⁹ bytes a second."""
        return self.weight_bytes / max(1, self.nanoseconds)

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
    ) -> None:
        """Check and encode `program`.

        Args:
            program: Its tensors are kept alive, not copied.
            dtype: Of the registers and the pages, fp32 or bf16.
            num_threads: That compute, the caller's among them.
            pin: The core of each thread, the caller's first; None: wherever the system puts them.

        Raises:
            RuntimeError: Registers, shapes or dtypes do not fit each other; the message names the
                instruction.
        """
        raise NotImplementedError

    def run(self, rows: Tensor, step: StepInputs) -> Tensor:
        """Hidden rows `[T, D]` for embedded `rows` `[T, D]`, which stay as they are."""
        raise NotImplementedError

    def run_tapped(
        self, rows: Tensor, step: StepInputs, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """`run`, and beside its rows those after so many layers, `[T, len(taps) * D]`."""
        raise NotImplementedError

    def counters(self) -> list[PhaseCount]:
        """What the steps took so far, by kind of instruction; those that never ran are left out."""
        raise NotImplementedError

    def reset_counters(self) -> None:
        """Start counting anew."""
        raise NotImplementedError

    def close(self) -> None:
        """Free registers and threads; also done when the object goes. Twice is once."""
        raise NotImplementedError
