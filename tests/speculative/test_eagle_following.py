"""Which sequences an EAGLE head follows: shared prefixes, other adapters, preemption."""

from dataclasses import replace

import pytest
from msgspec import structs
from support.eagle_world import PROMPTS, World, comparison, make_head

from plait.platform.core import AdapterUse, Speculation
from plait.platform.ops._native import has_kernels
from plait.speculative.eagle import ASKED_AGAIN


def test_a_cached_prefix_that_the_head_saw_gives_the_same_drafts(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    check = comparison(world, shape, tensors)
    first = world.add(PROMPTS[4], max_tokens=6)
    world.run(check)
    again = world.add([*first.tokens, 9, 8, 7], max_tokens=6)
    assert world.run(check) >= 2
    assert again.num_cached_tokens >= len(PROMPTS[4])
    assert world.source.figures["unseen_sequences"] == 0


def test_siblings_share_what_their_leader_saw(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path)
    world.add(PROMPTS[4], n=3)
    assert world.run(comparison(world, shape, tensors)) >= 12
    assert world.source.figures["unseen_sequences"] == 0


def test_a_cached_prefix_that_the_head_did_not_see_gives_no_drafts(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path, follows=lambda s: s.request.speculation.enabled)
    off = Speculation(enabled=False)
    silent = world.add(PROMPTS[4], speculation=off)
    world.run(lambda _sequence, draft: draft is not None and pytest.fail("not followed"))
    assert not any(world.steps_tapped)
    again = world.add(PROMPTS[4])
    other = world.add(PROMPTS[3])
    check = comparison(world, shape, tensors)

    def per_sequence(sequence, draft):
        assert world.source.takes(sequence) == (draft is not None)
        return (draft is None) if sequence is again else check(sequence, draft)

    assert world.run(per_sequence) >= 8
    assert again.num_cached_tokens > 0
    assert again.output_token_ids == silent.output_token_ids
    assert other.output_token_ids == world.truth(PROMPTS[3], 8)
    assert world.source.figures["unseen_sequences"] == 1


def test_blocks_reused_by_a_sequence_that_is_not_followed_count_as_unseen(target, tmp_path):
    path, *_ = make_head(tmp_path)
    world = World(target, path, num_blocks=12, follows=lambda s: s.request.speculation.enabled)
    world.add(PROMPTS[4])
    world.run(lambda *_: 0)
    # The same text without the head, in a world so small that blocks are taken anew.
    world.add([1, *range(100, 130)], speculation=Speculation(enabled=False))
    world.run(lambda *_: 0)
    world.add(PROMPTS[4], speculation=Speculation(enabled=False))
    world.run(lambda *_: 0)
    world.add(PROMPTS[4])
    assert world.run(lambda _sequence, draft: draft is None) > 0
    assert world.source.figures["unseen_sequences"] == 1


def test_prefixes_are_told_apart_by_adapters(target, tmp_path):
    """Also by those that change no K and V: they can still change what is tapped."""
    path, *_ = make_head(tmp_path)
    world = World(target, path)
    blocks = world.source._blocks
    plan_of = []
    world.add(PROMPTS[4])
    while world.unfinished:
        plan_of.append(world.step())
    first = next(span for plan in plan_of for span in plan.spans)
    use = AdapterUse(generation="ab" * 32)
    request = replace(first.sequence.request, adapters=(use,))
    sequence = replace(first.sequence, seq_id=77, request=request)
    span = structs.replace(plan_of[1].spans[0], sequence=sequence)
    assert not blocks.begin(span, is_wanted=True).is_followed
    plain = replace(first.sequence, seq_id=78)
    del blocks._states[77]
    assert span.start > 0
    span = structs.replace(span, start=4, num_tokens=4, sequence=plain)
    assert blocks.begin(span, is_wanted=True).is_followed


def test_a_preempted_sequence_is_followed_again(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path, num_blocks=20, caching=True)
    for prompt in (PROMPTS[4], PROMPTS[1], [*PROMPTS[4], 3]):
        world.add(prompt, max_tokens=20)
    sequences = list(world.unfinished)
    check = comparison(world, shape, tensors)

    def seen(sequence, draft):
        return 0 if draft is None else check(sequence, draft)

    assert world.run(seen, limit=4) >= 30
    assert sum(s.num_preemptions for s in sequences) > 0
    for sequence in sequences:
        prompt = list(sequence.request.prompt_token_ids)
        assert sequence.output_token_ids == world.truth(prompt, 20)


@pytest.mark.skipif(not has_kernels(), reason="first drafts are chosen by programs")
@pytest.mark.parametrize("limit", [1, 4])
def test_first_drafts_are_those_of_the_reference_and_cost_no_pass(limit, target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path, takes_likeliest=lambda _sequence: True)
    check = comparison(world, shape, tensors, limit)
    for prompt in (PROMPTS[4], PROMPTS[1]):
        world.add(prompt)

    def known(sequence, draft):
        assert world.source.knows_first(sequence)
        assert world.source.last.num_forwards <= limit - 1
        return check(sequence, draft)

    assert world.run(known, limit) >= 8
    assert (world.source.figures["forwards"] == 0) == (limit == 1)


@pytest.mark.skipif(not has_kernels(), reason="first drafts are chosen by programs")
def test_first_drafts_are_chosen_only_while_they_are_asked_for(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    world = World(target, path, takes_likeliest=lambda _sequence: True)
    check = comparison(world, shape, tensors)
    sequence = world.add(PROMPTS[4], max_tokens=20)
    for _ in range(ASKED_AGAIN + 4):
        world.step()
    assert not world.source.knows_first(sequence)
    ((_, draft),) = world.propose().values()
    assert check(sequence, draft)
    world.step()
    assert world.source.knows_first(sequence)
