"""The instruction set that the kernels use: the processor's best, or the one that was asked for."""

from __future__ import annotations

from plait.platform.errors import ConfigError


def check_instruction_set() -> None:
    """Raises `ConfigError` where one was asked for that is unknown or that this processor lacks.

    Imports torch.
    """
    import torch

    from plait.platform.ops._native import has_kernels

    if not has_kernels():
        return
    try:
        torch.ops.plait.cpu_isa()
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"--cpu-isa: {reason}; leave it out for the best there is", param="cpu_isa"
        ) from error
