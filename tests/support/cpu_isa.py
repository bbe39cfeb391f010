"""The instruction sets that tests of C++ kernels run on."""

import os

import torch

from plait.platform.ops.linear import linear, pack_linear

NAMES = ("generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16")


def available() -> list[str]:
    """Returns those that this processor has, by asking the kernels for each."""
    before = os.environ.get("PLAIT_CPU_ISA")
    found = []
    try:
        for name in NAMES:
            os.environ["PLAIT_CPU_ISA"] = name
            try:
                linear(torch.ones(1, 1), pack_linear(torch.ones(1, 1)))
                found.append(name)
            except RuntimeError as error:
                if "has no more than" not in str(error):
                    raise
    finally:
        if before is None:
            del os.environ["PLAIT_CPU_ISA"]
        else:
            os.environ["PLAIT_CPU_ISA"] = before
    return found
