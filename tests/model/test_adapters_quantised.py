"""Adapters on quantised bases: PEFT on the numbers that the codes stand for is the oracle."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import torch
from support.adapter_driver import AdapterDriver, AdapterTrack, random_prompt, run
from support.adapter_matrix import World, alone
from support.peft_adapters import load_base
from support.tiny_models import VOCAB_SIZE

from plait.platform.config import Options
from plait.platform.model import adapters, load_model
from plait.platform.model.experts import PackedExperts
from plait.platform.ops.likeliest import likeliest

CASES = {
    ("llama", "int4"): (
        "linear", "dora", "lora_bias", "patterns", "saved_head", "saved_embedding",
        "trained_tokens", "embedding_and_head", "new_tokens",
    ),
    ("qwen2", "int8"): ("trained_tokens", "embedding_dora", "saved_embedding", "new_tokens"),
    ("qwen3_moe", "int4"): ("experts",),
}  # fmt: skip


@dataclass
class QuantisedWorld(World):
    """A checkpoint that is quantised at load, and a base with the numbers which that gives."""

    quantization: str = "int8"

    def load(self, executor):
        options = Options(
            model=str(self.checkpoint),
            dtype=self.dtype,
            quantization=self.quantization,
            quantized_activations="exact",
            executor=executor,
        )
        return load_model(options).executor

    @cached_property
    def executor(self):
        return self.load("auto")

    @cached_property
    @torch.no_grad()
    def base(self):
        model = load_base(self.checkpoint)
        ours = self.load("torch")
        for name, site in ours.leaves.sites.items():
            numbers = site.leaf.packed.unpack()[site.start : site.end]
            model.get_submodule(name).weight.copy_(numbers)
        for name, module in ours._backbone.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, PackedExperts):
                    numbers = torch.stack([expert.unpack() for expert in value.experts])
                    getattr(model.model.get_submodule(name), attribute).copy_(numbers)
        rows = ours._backbone.get_input_embeddings()(torch.arange(VOCAB_SIZE))
        model.get_input_embeddings().weight.copy_(rows)
        return model


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    return {
        (family, quantization): QuantisedWorld(
            family, folder / f"{family}-{quantization}", quantization=quantization
        )
        for family, quantization in CASES
    }


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, names in CASES.items() for name in names]
)
def test_logits_equal_those_of_peft_on_what_the_codes_stand_for(world, name, worlds):
    case = worlds[world].case(name)
    got = alone(worlds[world], case.track())
    torch.testing.assert_close(got, case.wanted, rtol=0, atol=2e-4)


def test_base_rows_are_the_same_bits_beside_adapters(worlds):
    world = worlds["llama", "int4"]
    prompts = [random_prompt(n, n) for n in (5, 19)]
    lone = [run(world.executor, [AdapterTrack(list(p), 3)])[0] for p in prompts]
    cases = [world.case(name).track(num_output=2) for name in ("dora", "saved_head", "new_tokens")]
    tracks = [AdapterTrack(list(p), 3) for p in prompts]
    first, *_, last = run(world.executor, [tracks[0], *cases, tracks[1]], chunk=9)
    for one, other in zip(lone, (first, last), strict=True):
        assert torch.equal(one, other[:, : one.shape[1]])


class GreedyDriver(AdapterDriver):
    """Asks for the likeliest tokens of every step's rows too, and for those of its logits."""

    def _take(self, tracks, counts, batch, hidden):
        rows = np.arange(len(hidden))
        tokens = self.executor.likeliest(hidden, rows, VOCAB_SIZE)
        assert tokens == likeliest(self.executor.logits(hidden, rows), VOCAB_SIZE)
        super()._take(tracks, counts, batch, hidden)


@pytest.mark.parametrize(
    ("name", "in_one_call"),
    [
        ("patterns", True),  # of layers alone
        ("saved_head", False),
        ("embedding_and_head", False),
        ("new_tokens", False),
    ],
)
def test_greedy_rows_get_their_token_with_the_head_where_no_adapter_changes_it(
    name, in_one_call, worlds, monkeypatch
):
    world = worlds["llama", "int4"]
    called = []
    original = adapters.linear_likeliest
    monkeypatch.setattr(
        adapters, "linear_likeliest", lambda *args: called.append(name) or original(*args)
    )
    beside = AdapterTrack(random_prompt(9, 9), 3)
    GreedyDriver(world.executor).run([world.case(name).track(num_output=3), beside])
    assert bool(called) is in_one_call
