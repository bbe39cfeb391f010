"""From a filled model and its torch executor to a native one, which was proved."""

from __future__ import annotations

from collections.abc import Callable

from plait.platform.model.build import Skeleton
from plait.platform.model.executor import TorchExecutor
from plait.platform.model.native.executor import NativeExecutor, ProgramRunner
from plait.platform.model.native.instructions import Program
from plait.platform.model.native.lowering import lower
from plait.platform.model.native.proof import prove
from plait.platform.model.native.trace import NotLowered
from plait.platform.ops._native import has_kernels


def make_native(
    skeleton: Skeleton,
    torch_executor: TorchExecutor,
    make_runner: Callable[[Program], ProgramRunner],
) -> NativeExecutor:
    """Lower what `torch_executor` runs, and prove that the program computes the same.

    Pages that are there are taken for the proof; `allocate` makes those that serve.

    Raises `NotLowered` with the place and the reason.
    """
    if not has_kernels():
        raise NotLowered("the compiled kernels are missing")
    lowered = lower(skeleton, torch_executor.kv_groups, num_positions=torch_executor.num_positions)
    try:
        runner = make_runner(lowered.program)
    except RuntimeError as error:
        raise NotLowered(f"the program does not fit its kernels: {error}") from error
    native = NativeExecutor(torch_executor, lowered, runner)
    native.agreement = prove(torch_executor, native)
    torch_executor.release()
    return native
