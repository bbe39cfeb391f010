"""PEFT is the oracle: adapters of every kind, alone and all in one batch with base rows."""

import pytest
import torch
from support.adapter_driver import AdapterTrack, random_prompt, run
from support.adapter_matrix import CASES, MATRIX, World, alone

from plait.platform.core import AdapterUse
from plait.platform.ops._native import has_kernels

bitwise = pytest.mark.skipif(not has_kernels(), reason="the C++ kernels are not built")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {family: World(family, folder / family) for family in MATRIX}


@pytest.mark.parametrize(("family", "name"), CASES)
def test_logits_equal_those_of_peft(family, name, worlds):
    case = worlds[family].case(name)
    got = alone(worlds[family], case.track())
    assert got.shape == case.wanted.shape
    torch.testing.assert_close(got, case.wanted, rtol=0, atol=1e-4)


@bitwise
@pytest.mark.parametrize("family", MATRIX)
def test_rows_have_the_same_bits_in_a_batch_of_all_kinds(family, worlds):
    world = worlds[family]
    plain = [AdapterTrack(random_prompt(n, n), 4) for n in (11, 26)]
    cases = [world.case(name) for name in MATRIX[family]]
    tracks = [plain[0], *(case.track(num_output=4) for case in cases), plain[1]]
    lone = [alone(world, track) for track in tracks]
    again = [
        AdapterTrack(track.tokens[: -len(track.output)], 4, start_step=i % 4, uses=track.uses)
        for i, track in enumerate(tracks)
    ]
    mixed = run(world.executor, again, chunk=7)
    for one, other in zip(lone, mixed, strict=True):
        width = one.shape[1]
        assert torch.equal(one, other[:, :width])
        assert (other[:, width:] == -torch.inf).all()


@bitwise
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_base_rows_are_bitwise_equal_before_beside_and_after_adapters(family, worlds, tmp_path):
    world = World(family, tmp_path)
    prompts = [random_prompt(n, n) for n in (5, 19)]

    def base_logits(others=()):
        tracks = [AdapterTrack(list(p), 3) for p in prompts]
        return run(world.executor, [tracks[0], *others, tracks[1]], chunk=9)[:: len(others) + 1]

    before = base_logits()
    cases = [world.case(name) for name in list(MATRIX[family])[:6]]
    loaded = base_logits()
    beside = base_logits([case.track(num_output=2) for case in cases])
    for case in cases:
        world.executor.remove_adapter(case.name)
    assert world.executor.placed_bytes == 0
    for later in (loaded, beside, base_logits()):
        for one, other in zip(before, later, strict=True):
            assert torch.equal(one, other)


@bitwise
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_bfloat16_rows_have_the_same_bits_alone_and_in_a_mix(family, tmp_path):
    world = World(family, tmp_path, dtype="bfloat16")
    cases = [world.case(name) for name in list(MATRIX[family])[:8]]
    lone = [alone(world, case.track(num_output=2)) for case in cases]
    mixed = run(
        world.executor,
        [case.track(num_output=2, start_step=i % 3) for i, case in enumerate(cases)],
        chunk=5,
    )
    for case, one, other in zip(cases, lone, mixed, strict=True):
        assert torch.equal(one, other[:, : one.shape[1]])
        if family == "qwen3_moe":
            continue  # rounding flips a router's choice now and then
        rows = slice(0, len(case.prompt))
        off = one[rows].log_softmax(-1) - case.wanted.log_softmax(-1)
        assert off.abs().mean() < 0.06, case.name


@torch.no_grad()
def test_several_adapters_with_scales_are_the_sum_of_their_changes(worlds):
    from peft import PeftModel
    from support.peft_adapters import quiet

    world = worlds["llama"]
    first, second = world.case("linear"), world.case("q_only")
    with quiet():
        import copy

        model = PeftModel.from_pretrained(copy.deepcopy(world.base), world.folder / "linear", "a")
        model.load_adapter(world.folder / "q_only", "b")
        model.add_weighted_adapter(["a", "b"], [0.7, 1.5], "sum", combination_type="cat")
        model.set_adapter("sum")
        wanted = model.eval()(input_ids=torch.tensor([first.prompt])).logits[0]
    uses = (
        AdapterUse(generation=first.name, scale=0.7),
        AdapterUse(generation=second.name, scale=1.5),
    )
    got = alone(world, AdapterTrack(list(first.prompt), 1, uses=uses))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    mixed = run(
        world.executor,
        [
            AdapterTrack(random_prompt(9, 1), 1),
            second.track(),
            AdapterTrack(list(first.prompt), 1, uses=uses),
            first.track(),
        ],
        chunk=6,
    )
    if has_kernels():
        assert torch.equal(mixed[2], got)
