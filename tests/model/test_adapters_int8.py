"""Adapters kept as int8: near PEFT's logits in fp32, and as independent of the batch as others."""

import pytest
import torch
from support.adapter_driver import AdapterTrack, random_prompt, run
from support.adapter_matrix import World, alone

from plait.platform.config import Options
from plait.platform.errors import ConfigError
from plait.platform.model.wishes import check_options

CASES = {
    "llama": ("linear", "dora", "lora_bias", "patterns", "embedding"),
    "qwen3_moe": ("experts",),
}
# What codes of a and b change of an adapter's effect, each by half a step of 1/127 at most.
MOST_CHANGED = 0.02


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    made = {family: World(family, folder / family) for family in CASES}
    for world in made.values():
        world.executor.keep_adapters_as(torch.int8)
    return made


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in CASES.items() for name in names]
)
def test_logits_are_near_those_of_peft(family, name, worlds):
    world = worlds[family]
    case = world.case(name)
    got = alone(world, case.track())
    difference = (got - case.wanted).norm()
    effect = (case.wanted - alone(world, AdapterTrack(list(case.prompt), 1))).norm()
    assert difference < MOST_CHANGED * effect
    assert difference > 0, "these are not codes"


@pytest.mark.parametrize("family", CASES)
def test_rows_have_the_same_bits_in_a_batch_of_all_kinds(family, worlds):
    world = worlds[family]
    plain = [AdapterTrack(random_prompt(n, n), 4) for n in (11, 26)]
    tracks = [plain[0], *(world.case(n).track(num_output=4) for n in CASES[family]), plain[1]]
    lone = [alone(world, track) for track in tracks]
    again = [
        AdapterTrack(track.tokens[: -len(track.output)], 4, start_step=i % 4, uses=track.uses)
        for i, track in enumerate(tracks)
    ]
    for one, other in zip(lone, run(world.executor, again, chunk=7), strict=True):
        assert torch.equal(one, other[:, : one.shape[1]])
    fresh = World(family, world.folder / "fresh")
    for track, logits in ((plain[0], lone[0]), (plain[1], lone[-1])):
        prompt = track.tokens[: -len(track.output)]
        assert torch.equal(alone(fresh, AdapterTrack(prompt, 4)), logits)


def test_another_type_is_refused_by_name():
    with pytest.raises(ConfigError, match="adapters are not kept as int4; use auto"):
        check_options(Options(model="x", adapter_dtype="int4"))
