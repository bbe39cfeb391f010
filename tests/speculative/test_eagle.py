"""Drafts of EAGLE heads against plain fp64 torch, under a real target, scheduler and sampler."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.eagle_heads import HeadShape, ReferenceHead
from support.eagle_world import (
    BLOCK_SIZE,
    NUM_LAYERS,
    NUM_SCRATCH,
    PROMPTS,
    World,
    comparison,
    load_target,
    make_head,
)
from support.tiny_models import VOCAB_SIZE

from plait.platform.config import CacheConfig
from plait.platform.sampling import Sampler

SHAPES = {
    "original": HeadShape(),
    "speculators": HeadShape(form="speculators", norm_before_residual=True),
    "whole vocabulary": HeadShape(draft_vocab_size=VOCAB_SIZE),
    "the target's embeddings": HeadShape(
        form="speculators", own_embeddings=False, taps=(1, 3), num_taps=2
    ),
    "norm before fc, usual taps": HeadShape(norm_before_fc=True, taps=None),
    "qwen3 with biases, low tap": HeadShape(
        form="speculators", model_type="qwen3", attention_bias=True, taps=(0, 2, 4)
    ),
    "another width": HeadShape(hidden_size=48, head_size=12, norm_before_residual=True),
}


@pytest.mark.parametrize("in_one_call", [True, False], ids=["a round a call", "a depth a call"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_drafts_are_the_reference_s_greedy_chain(shape, in_one_call, target, tmp_path):
    path, _, tensors = make_head(tmp_path, shape)
    world = World(target, path, takes_likeliest=lambda _sequence: in_one_call)
    for prompt in PROMPTS:
        world.add(prompt)
    check = comparison(world, shape, tensors)
    assert world.run(check) >= 20
    assert world.source.figures["faults"] == 0


def test_drafts_are_right_after_accepted_and_rejected_ones(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    truths = {}
    for prompt in PROMPTS:
        sequence = world.add(prompt, max_tokens=14)
        truths[sequence.seq_id] = world.truth(prompt, 14)

    def drafts(sequence):
        """So many right ones, then a wrong one."""
        done = sequence.num_output_tokens
        right = truths[sequence.seq_id][done : done + (3 * done + sequence.seq_id) % 4]
        return [*right, 1, 1]

    sequences = list(world.unfinished)
    assert world.run(comparison(world, shape, tensors), drafts=drafts) >= 20
    for sequence in sequences:
        assert sequence.output_token_ids == truths[sequence.seq_id]
        assert 0 < sequence.num_accepted_tokens < sequence.num_draft_tokens


def test_a_draft_goes_on_behind_that_of_others(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    world.add(PROMPTS[1])
    while not world.lacking_one():
        world.step()
    ((sequence, whole),) = world.propose(6).values()
    ((_, rest),) = world.propose(4, after=whole.tokens[:2]).values()
    assert rest.tokens == whole.tokens[2:]
    assert rest.chances == pytest.approx(whole.chances[2:])
    ((_, other),) = world.propose(2, after=(300, 301)).values()
    assert other.tokens != rest.tokens[:2]
    tokens = list(sequence.tokens)
    reference = ReferenceHead(shape, tensors, torch.zeros(1))
    again = reference.chain(world.taps_of(tokens)[:-1], tokens, 6)
    assert whole.tokens == tuple(int(row.argmax()) for row in again)


def test_a_row_s_drafts_do_not_depend_on_its_neighbours(target, tmp_path):
    path, *_ = make_head(tmp_path)
    kept = []

    def keep(sequence, draft):
        key = sequence.request.request_id, sequence.num_output_tokens
        kept.append((key, draft.tokens, draft.chances))
        return 1

    together = World(target, path, rows=64)
    for i, prompt in enumerate(PROMPTS):
        together.add(prompt, request_id=f"p{i}")
    together.run(keep)
    mixed, kept[:] = sorted(kept), []
    for i, prompt in enumerate(PROMPTS):
        alone = World(target, path, rows=16)
        alone.add(prompt, request_id=f"p{i}")
        alone.run(keep)
    assert sorted(kept) == mixed  # to the last bit


def test_sampled_drafts_are_chosen_as_the_target_chooses(target, tmp_path):
    """With the sampler's own noise of each position, at the request's temperature."""
    path, shape, tensors = make_head(tmp_path)
    sampler = Sampler(VOCAB_SIZE, ())
    world = World(target, path, choose=sampler.choose)
    reference = ReferenceHead(shape, tensors, torch.zeros(1))
    world.add(PROMPTS[3], temperature=0.8)
    world.add(PROMPTS[1], temperature=1.5)
    greedy_too = []

    def check(sequence, draft):
        def choose(drafts, row):
            return sampler.choose(sequence, drafts, row.float().numpy())

        tokens = list(sequence.tokens)
        rows = reference.chain(world.taps_of(tokens)[:-1], tokens, 4, choose)
        wanted = [choose(draft.tokens[:i], row) for i, row in enumerate(rows)]
        assert draft.tokens == tuple(wanted)
        scale = sequence.request.params.temperature
        chances = [float((r / scale).softmax(-1)[t]) for r, t in zip(rows, wanted, strict=True)]
        assert draft.chances == pytest.approx(chances, rel=1e-4)
        greedy_too.append(wanted == [int(row.argmax()) for row in rows])
        return 1

    assert world.run(check) >= 10
    assert not all(greedy_too)


def test_a_mask_forbids_and_ends_chains(target, tmp_path):
    path, *_ = make_head(tmp_path)
    seen = []

    def mask(_sequence, drafts, row):
        seen.append(drafts)
        row[np.arange(VOCAB_SIZE) % 2 == 0] = -np.inf
        return len(drafts) < 2

    world = World(
        target, path, mask=mask, choose=lambda _s, _d, row, masked: int(row.argmax()) * masked
    )
    sequence = world.add(PROMPTS[1])
    while not world.lacking_one():
        world.step()
    sequence.request = replace(sequence.request, grammar=object())
    ((_, draft),) = world.propose(4).values()
    assert len(draft.tokens) == 2
    assert all(token % 2 == 1 for token in draft.tokens)
    assert seen == [(), draft.tokens[:1], draft.tokens]
    world.source._choice._mask = lambda _s, _d, row: row.fill(-np.inf) or True
    ((_, draft),) = world.propose(4).values()
    assert draft is None


@pytest.mark.parametrize("in_one_call", [True, False], ids=["a round a call", "a depth a call"])
def test_chains_end_at_end_tokens_and_below_the_floor(in_one_call, target, tmp_path):
    path, *_ = make_head(tmp_path)
    world = World(target, path, takes_likeliest=lambda _sequence: in_one_call)
    world.add(PROMPTS[1])
    while not world.lacking_one():
        world.step()
    ((sequence, whole),) = world.propose(5).values()
    params = replace(sequence.request.params, stop_token_ids=(whole.tokens[1],))
    plain = sequence.request
    sequence.request = replace(plain, params=params)
    ((_, ended),) = world.propose(5).values()
    end = whole.tokens.index(whole.tokens[1]) + 1
    assert ended.tokens == whole.tokens[:end]
    sequence.request = plain
    floor = whole.chances[0] * whole.chances[1] * 1.01
    for limit, length in ((1, 2), (3, 3)):  # what is asked for is drafted however unlikely it is
        ((_, short),) = world.propose(limit, extra=5 - limit, floor=floor).values()
        assert short.tokens == whole.tokens[:length]
    ((_, long),) = world.propose(1, extra=4, floor=0.0).values()
    assert long.tokens == whole.tokens


def test_a_round_without_room_is_shorter(target, tmp_path):
    path, *_ = make_head(tmp_path)
    world = World(target, path)
    world.add(PROMPTS[1], max_tokens=100)
    while not world.lacking_one():
        world.step()
    ((sequence, draft),) = world.propose(1000).values()
    table = len(sequence.block_ids[0]) + NUM_SCRATCH
    assert len(draft.tokens) == table * BLOCK_SIZE - (len(sequence.tokens) - 1) + 1


def test_a_fault_costs_drafts_and_no_request(target, tmp_path, monkeypatch):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    world.add(PROMPTS[0], max_tokens=30)
    while not world.lacking_one():
        world.step()

    def broken(_rows):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(world.source.head, "forward", broken)
        assert [draft for _, draft in world.propose().values()] == [None]
    world.add(PROMPTS[3])
    check = comparison(world, shape, tensors)
    first = world.unfinished[0]
    world.run(lambda s, draft: (draft is None) if s is first else check(s, draft))
    assert world.source.figures["faults"] == 1
    assert first.output_token_ids == world.truth(PROMPTS[0], 30)
    monkeypatch.setattr(world.source.head, "forward", broken)
    for prompt in PROMPTS[:4]:
        world.add(prompt)
        world.run(lambda _s, draft: draft is None)
    assert world.source.is_off
    world.add(PROMPTS[0])
    world.steps_tapped.clear()
    world.run(lambda _s, draft: draft is None)
    assert not any(world.steps_tapped)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_taps_are_what_transformers_has_between_layers(kind, tmp_path):
    executor, peer = load_target(tmp_path, executor=kind)
    world_groups = tuple(replace(g, num_blocks=8) for g in executor.kv_groups)
    executor.allocate(
        CacheConfig(block_size=4, groups=world_groups, dtype="float32", enable_prefix_caching=False)
    )
    from support.step_driver import StepDriver, Track

    driver = StepDriver(executor)
    track = Track(tokens=PROMPTS[1][:7], num_output=1)
    batch = driver._batch([track], [7])
    plain = executor.forward(batch)
    hidden, taps = executor.forward_tapped(batch, (0, NUM_LAYERS, 2, 2))
    assert torch.equal(hidden, plain)
    last = []
    hook = peer.model.layers[-1].register_forward_hook(lambda _m, _a, out: last.append(out))
    with torch.no_grad():
        out = peer(torch.tensor([track.tokens]), output_hidden_states=True)
    hook.remove()
    middle = out.hidden_states[2][0]
    wanted = torch.cat([out.hidden_states[0][0], last[0][0], middle, middle], dim=-1)
    torch.testing.assert_close(taps.double(), wanted, rtol=1e-4, atol=1e-4)
    if kind == "torch":
        assert not any(module._forward_hooks for module in executor._backbone.layers)
