"""Placing adapters: exact sizes, beside steps, and what cannot be computed is refused by name."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.adapter_driver import AdapterDriver, AdapterTrack, random_prompt, run
from support.adapter_matrix import World, alone
from support.peft_adapters import make_adapter

from plait.adapters.adapter import Adapter, LowRank, Rows, Whole
from plait.adapters.info import AdapterInfo, LoadReport
from plait.adapters.loading import load_adapter
from plait.platform.core import AdapterUse
from plait.platform.errors import InternalError, InvalidAdapter


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World("llama", tmp_path_factory.mktemp("world"))


def adapter_of(generation="direct", **parts):
    return Adapter(info=AdapterInfo(generation=generation, report=LoadReport()), **parts)


def low_rank(world, name="model.layers.0.self_attn.q_proj", *, rank=3, **fields):
    site = world.executor.sites.sites[name]
    generator = torch.Generator().manual_seed(1)
    given = {
        "a": torch.randn(rank, site.in_features, generator=generator),
        "b": torch.randn(site.out_features, rank, generator=generator) / 8,
        "scale": 0.5,
    }
    return LowRank(site=site, **{**given, **fields})


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["patterns", "dora", "lora_bias", "embedding", "saved_head", "new_tokens"]),
        ("qwen2", ["trained_tokens", "saved_embedding"]),
        ("qwen3_moe", ["experts"]),
    ],
)
def test_bytes_are_known_before_and_are_gone_after(family, names, tmp_path):
    world = World(family, tmp_path)
    for name in names:
        before = world.executor.placed_bytes
        case = world.case(name)
        taken = world.executor.placed_bytes - before
        assert taken == world.executor.adapter_bytes(case.adapter) > 0, name
        world.executor.place_adapter(case.adapter)  # again: no error, no bytes
        assert world.executor.placed_bytes == before + taken
    for name in names:
        world.executor.remove_adapter(name)
    assert world.executor.placed_bytes == 0


def test_adapters_come_and_go_on_another_thread_while_steps_run(world, tmp_path):
    directory = make_adapter(
        world.checkpoint, tmp_path, r=8, target_modules="all-linear", use_dora=True
    )
    adapter = load_adapter("kept", directory, world.executor.sites, max_rank=64)
    world.executor.place_adapter(adapter)
    uses = (AdapterUse(generation="kept"),)
    quiet = run(world.executor, [AdapterTrack(random_prompt(20, 1), 30, uses=uses)], chunk=3)[0]
    generations = [
        replace(adapter, info=replace(adapter.info, generation=f"other{n}")) for n in range(40)
    ]

    def come_and_go():
        for other in generations:
            world.executor.place_adapter(other)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(come_and_go)
        driver = AdapterDriver(world.executor)
        while True:
            track = AdapterTrack(random_prompt(20, 1), 30, uses=uses)
            driver.run([track], chunk=3)
            assert torch.equal(torch.stack(track.logprobs), quiet)
            if done.done():
                break
        done.result()
    for other in generations:
        world.executor.remove_adapter(other.generation)


def test_placed_again_after_removal_it_gives_the_same_bits(world):
    case = world.case("dora")
    before = alone(world, case.track(num_output=3))
    world.executor.remove_adapter(case.name)
    with pytest.raises(InternalError, match="was not placed"):
        alone(world, case.track())
    world.executor.place_adapter(case.adapter)
    assert torch.equal(before, alone(world, case.track(num_output=3)))


def test_a_saved_table_that_equals_the_base_costs_nothing(world):
    sites = world.executor.sites.sites
    head, embedding = sites["lm_head"], sites["model.embed_tokens"]
    base = world.base.state_dict()
    same = adapter_of(
        wholes=(
            Whole(site=head, weight=base["lm_head.weight"].clone()),
            Whole(site=embedding, weight=base["model.embed_tokens.weight"].clone()),
        )
    )
    nothing = adapter_of()
    assert world.executor.adapter_bytes(same) == world.executor.adapter_bytes(nothing)
    changed = base["lm_head.weight"].clone()
    changed[[4, 200]] += 1
    few = adapter_of(wholes=(Whole(site=head, weight=changed),))
    rows = Rows(site=head, token_ids=torch.tensor([4, 200]), rows=changed[[4, 200]])
    assert world.executor.adapter_bytes(few) == world.executor.adapter_bytes(
        adapter_of(rows=(rows,))
    )


def test_a_site_that_is_not_there_is_refused_by_name(world):
    site = replace(world.executor.sites.sites["lm_head"], name="model.layers.9.q_proj")
    with pytest.raises(InvalidAdapter, match=r"model\.layers\.9\.q_proj"):
        world.executor.place_adapter(adapter_of(low_rank=(low_rank(world), low_rank_at(site))))


def low_rank_at(site):
    return LowRank(
        site=site, a=torch.ones(1, site.in_features), b=torch.ones(site.out_features, 1), scale=1.0
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": torch.ones(3, 63)}, "takes A"),
        ({"b": torch.ones(64, 2)}, "takes A"),
        ({"expert": 1}, "experts"),
        ({"magnitude": torch.full((64,), torch.nan)}, "DoRA norm"),
    ],
    ids=["inputs", "ranks", "expert", "norm"],
)
def test_what_does_not_fit_is_refused_by_name(world, fields, message):
    with pytest.raises(InvalidAdapter, match=message) as error:
        world.executor.place_adapter(adapter_of(low_rank=(low_rank(world, **fields),)))
    assert "model.layers.0.self_attn.q_proj" in error.value.message


def test_dora_on_a_table_whose_rows_are_replaced_is_refused(world):
    head = low_rank(world, "lm_head", magnitude=torch.ones(307))
    rows = Rows(site=head.site, token_ids=torch.tensor([7]), rows=torch.ones(1, 64))
    with pytest.raises(InvalidAdapter, match="DoRA"):
        world.executor.place_adapter(adapter_of(low_rank=(head,), rows=(rows,)))


def test_a_token_that_no_adapter_of_its_row_adds_is_never_computed(world):
    case = world.case("new_tokens")
    stray = AdapterTrack([5, 6, 307], 1)
    with pytest.raises(InternalError, match="token 307"):
        run(world.executor, [case.track(), stray])
    with pytest.raises(InternalError, match="token 307"):
        run(world.executor, [stray])


def test_a_gap_among_added_tokens_is_never_likely(world):
    case = world.case("new_tokens")  # adds 307 and 309
    head = world.executor.sites.sites["lm_head"]
    rows = Rows(site=head, token_ids=torch.tensor([309]), rows=torch.ones(1, head.in_features))
    world.executor.place_adapter(adapter_of("gap", rows=(rows,)))
    track = AdapterTrack(random_prompt(6, 1), 1, uses=(AdapterUse(generation="gap"),))
    logits = run(world.executor, [track, case.track()])[0]
    assert logits.shape[1] == 310
    assert (logits[:, [307, 308]] == -torch.inf).all()
    assert logits[:, 309].isfinite().all()


def test_logits_may_be_asked_for_in_any_order(world):
    cases = [world.case("embedding_and_head"), world.case("saved_head")]
    driver = AdapterDriver(world.executor)
    batch = driver._batch([case.track() for case in cases], [9, 9])
    hidden = world.executor.forward(batch)
    rows = np.array([11, 3, 17, 0, 9, 3])
    sorted_rows = np.arange(18)
    everything = world.executor.logits(hidden, sorted_rows)
    assert torch.equal(world.executor.logits(hidden, rows), everything[torch.from_numpy(rows)])


def test_a_layer_that_takes_other_rows_than_the_steps_is_an_error(world):
    case = world.case("linear")
    driver = AdapterDriver(world.executor)
    world.executor.forward(driver._batch([case.track()], [9]))
    leaf = world.executor.leaves.sites["model.layers.0.mlp.down_proj"].leaf
    with pytest.raises(InternalError, match="8 of 9 rows"):
        leaf(torch.ones(8, leaf.in_features))


def test_steps_of_the_same_rows_share_their_table_of_segments(world):
    case = world.case("linear")
    driver = AdapterDriver(world.executor)
    step = world.executor.leaves.sites["model.layers.0.mlp.down_proj"].leaf.adapters
    tables = []
    for num_rows in (9, 9, 8):
        world.executor.forward(driver._batch([case.track()], [num_rows]))
        assert step.segments.num_rows == num_rows
        tables.append(step.segments)
    assert tables[0] is tables[1]
    world.executor.forward(driver._batch([AdapterTrack([5, 6], 1)], [2]))
    assert step.segments is None
