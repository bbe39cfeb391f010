"""A row's bits never depend on what else the step computes."""

import pytest
import torch
from support.step_driver import StepDriver, Track
from support.tiny_models import FAMILIES, make_checkpoint

from plait.platform.config import Options
from plait.platform.model import load_model
from plait.platform.ops._native import has_kernels

pytestmark = pytest.mark.skipif(not has_kernels(), reason="the C++ kernels are not built")


def prompt(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 300, (length,), generator=generator).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_rows_are_bitwise_equal_alone_and_in_a_mix(family, dtype, tmp_path):
    directory = make_checkpoint(family, tmp_path)
    executor = load_model(Options(model=str(directory), dtype=dtype)).executor
    lengths = (37, 1, 18, 50, 5)
    alone = [Track(prompt(n, seed), num_output=6) for seed, n in enumerate(lengths)]
    for track in alone:
        StepDriver(executor, seed=3).run([track], chunk=64)
    mixed = [
        Track(prompt(n, seed), num_output=6, start_step=seed) for seed, n in enumerate(lengths)
    ]
    StepDriver(executor, seed=4).run(mixed, chunk=7)
    for one, other in zip(alone, mixed, strict=True):
        assert one.output == other.output
        assert torch.equal(torch.stack(one.hidden), torch.stack(other.hidden))
        assert torch.equal(torch.stack(one.logprobs), torch.stack(other.logprobs))
