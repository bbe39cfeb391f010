"""PEFT is the oracle: adapters of every kind, alone and all in one batch with base rows."""

import copy

import pytest
import torch
from support.adapter_driver import AdapterTrack, random_prompt, run
from support.adapter_matrix import CASES, MATRIX, World, alone
from support.peft_adapters import quiet
from support.tiny_models import VOCAB_SIZE

from plait.adapters.sites import SiteKind
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


COMPOSITIONS = {
    "two": {"linear": 0.7, "q_only": -1.5},
    "three_with_head": {"saved_head": 1.0, "head": 0.5, "lora_bias": 2.0},
    "added_tokens_beside_an_embedding": {"new_tokens": 1.0, "embedding": -0.8},
    "tables": {"embedding_and_head": 1.4, "trained_tokens": 1.0, "patterns": 0.25},
}


@torch.no_grad()
def merged(base, adapters):
    """A model whose weights have all changes added to them; replaced rows are put in first."""
    model = copy.deepcopy(base)
    width = max(adapter.info.vocab_size or VOCAB_SIZE for adapter, _ in adapters)
    with quiet():
        model.resize_token_embeddings(width, mean_resizing=False)
    for adapter, _ in adapters:
        for rows in adapter.rows:
            model.get_submodule(rows.site.name).weight[rows.token_ids] = rows.rows
        for whole in adapter.wholes:
            model.get_submodule(whole.site.name).weight[: len(whole.weight)] = whole.weight
    for adapter, scale in adapters:
        for change in adapter.low_rank:
            module = model.get_submodule(change.site.name)
            update = scale * change.scale * change.b @ change.a
            if change.site.kind is SiteKind.EMBEDDING:
                update = update.T
            module.weight[: len(update)] += update
            if change.b_bias is not None:
                module.bias = torch.nn.Parameter(scale * change.scale * change.b_bias)
    return model


@bitwise
@torch.no_grad()
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_several_adapters_with_scales_are_the_sum_of_their_changes(name, worlds):
    world = worlds["llama"]
    scales = COMPOSITIONS[name]
    cases = [world.case(adapter) for adapter in scales]
    prompt = cases[0].prompt
    model = merged(world.base, [(case.adapter, scales[case.name]) for case in cases])
    wanted = model(input_ids=torch.tensor([prompt])).logits[0]
    uses = tuple(AdapterUse(generation=g, scale=scale) for g, scale in scales.items())
    got = alone(world, AdapterTrack(list(prompt), 1, uses=uses))
    has_token = got[0].isfinite()
    torch.testing.assert_close(got[:, has_token], wanted[:, has_token], rtol=0, atol=1e-4)
    neighbours = [AdapterTrack(random_prompt(9, 1), 1), *(case.track() for case in cases)]
    mixed = run(world.executor, [neighbours[0], AdapterTrack(list(prompt), 1, uses=uses),
                                 *neighbours[1:]], chunk=6)  # fmt: skip
    assert torch.equal(mixed[1][:, : got.shape[1]], got)


@torch.no_grad()
def test_the_sum_is_that_of_pefts_weighted_adapters(worlds):
    from peft import PeftModel

    world = worlds["llama"]
    first, second = world.case("linear"), world.case("q_only")
    with quiet():
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
