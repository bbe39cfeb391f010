"""A draft model over executors that read their KV back: what it says stems from right blocks.

The draft model is the target once more, with pages of its own. So each of its drafts must hold,
whatever happened to the blocks; and a read of a slot that it did not write, or that others wrote
since, raises in the executor.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from support.fake_adapters import AdapterFiles
from support.history_executor import EOS, VOCAB_SIZE, HistoryExecutor, engine_config

from plait.adapters.pool import AdapterPool
from plait.adapters.strand import AdapterStrand
from plait.platform.config import EngineConfig
from plait.platform.core import (
    AdapterUse,
    Event,
    Request,
    SamplingParams,
    Sequence,
    SequenceState,
    Speculation,
)
from plait.platform.drafting import NoDrafts
from plait.platform.engine import Engine
from plait.platform.sampling import Sampler
from plait.platform.strand import Strand
from plait.speculative.draft_model import DraftBounds, DraftModel
from plait.speculative.source import MAX_FAULTS, Draft, Want

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=12, seed=3),
    SamplingParams(temperature=0.7, max_tokens=12, seed=4, top_p=0.9, frequency_penalty=0.8),
    SamplingParams(temperature=1.3, max_tokens=12, seed=5, top_k=9, repetition_penalty=1.4),
    SamplingParams(temperature=0.0, max_tokens=12, min_tokens=8, presence_penalty=1.5),
    SamplingParams(temperature=1.5, max_tokens=12, seed=6, min_p=0.05, logit_bias={7: 3.0}),
)


class ModelDrafts(NoDrafts, Strand):
    """Implements `Drafter`: all that a draft model says is verified."""

    def __init__(self, source: DraftModel, *, limit: int = 4, seed: int | None = None) -> None:
        self.source = source
        self.limit = limit
        self.rng = None if seed is None else random.Random(seed)  # who is left out now and then
        self.unfinished: dict[int, Sequence] = {}
        self.largest_catch_up = 0

    def draft(self, sequences: SequenceOf[Sequence], room: int) -> None:
        wants = [
            Want(
                sequence=sequence,
                limit=min(self.limit, sequence.max_total_tokens - len(sequence.tokens) - 1),
            )
            for sequence in sequences
            if sequence.request.speculation.enabled
            and self.source.takes(sequence)
            and (self.rng is None or self.rng.random() < 0.7)
        ]
        assert all(self.source.lag(want.sequence) < len(want.sequence.tokens) for want in wants)
        for want, draft in zip(wants, self.source.propose(wants), strict=True):
            if draft is not None:
                assert len(draft.tokens) == len(draft.chances) <= want.limit
                want.sequence.drafts[:] = draft.tokens
        self.largest_catch_up = max(self.largest_catch_up, self.source.last.num_catch_up_rows)

    def admit(self, sequence: Sequence) -> bool:
        self.unfinished[sequence.seq_id] = sequence
        return True

    def release(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.FINISHED:
            self.source.release(sequence)
            self.unfinished.pop(sequence.seq_id, None)

    @property
    def busy(self) -> bool:
        return False

    def check_integrity(self, running: object) -> None:
        self.source.check_integrity(list(self.unfinished.values()))


def make_source(
    config: EngineConfig, *, max_rows: int = 16, num_scratch: int = 8, **of_model: object
) -> tuple[DraftModel, HistoryExecutor]:
    executor = HistoryExecutor(replace(config, model=replace(config.model, **of_model)))  # type: ignore[arg-type]
    bounds = DraftBounds(
        block_size=config.cache.block_size,
        group=0,
        num_blocks=config.cache.groups[0].num_blocks,
        num_scratch=num_scratch,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        max_rows=max_rows,
    )
    return DraftModel(executor, bounds, choose=Sampler(VOCAB_SIZE, (EOS,)).choose), executor


class World:
    """An engine that drafts with a model, or one that does not."""

    def __init__(
        self,
        *,
        drafting: bool = True,
        seed: int | None = None,
        max_rows: int = 16,
        num_scratch: int = 8,
        limit: int = 4,
        root: Path | None = None,
        **config: object,
    ) -> None:
        resolved = engine_config(**config)  # type: ignore[arg-type]
        self.source, self.executor = make_source(
            resolved, max_rows=max_rows, num_scratch=num_scratch
        )
        self.drafts = ModelDrafts(self.source, seed=seed, limit=limit)
        target = HistoryExecutor(resolved)
        strands: list[Strand] = [self.drafts]
        self.pool = None
        if root is not None:
            self.files = AdapterFiles(root)
            self.pool = AdapterPool(target, self.files.load, device_bytes=99, host_bytes=999)
            strands.append(AdapterStrand(self.pool, drain_s=0.2))
        self.engine = Engine(
            resolved,
            target,
            None,
            strands=strands,
            adapters=self.pool,
            drafter=self.drafts if drafting else None,
        )
        self.events: dict[tuple[str, int], list[Event]] = defaultdict(list)
        self.num_steps = 0

    def run(self, *requests: Request) -> dict[tuple[str, int], list[int]]:
        """Run requests to their end; their tokens."""
        for request in requests:
            self.engine.add(request)
        while self.engine.has_unfinished:
            for event in self.engine.step():
                assert event.error is None, event.error
                self.events[event.request_id, event.index].append(event)
            self.num_steps += 1
            self.engine.scheduler.check_integrity()
        names = {r.request_id for r in requests}
        return {
            key: [token for event in events for token in event.token_ids]
            for key, events in self.events.items()
            if key[0] in names
        }

    def check_all_held(self) -> None:
        """Every draft held, and nothing is left over."""
        assert self.source.figures["faults"] == 0
        ends = [events[-1] for events in self.events.values()]
        assert sum(end.num_draft_tokens for end in ends) > 0
        assert all(end.num_accepted_tokens == end.num_draft_tokens for end in ends)
        self.source.check_integrity([])
        assert self.engine.stats.kv_usage == 0


def ask(name: str, prompt: SequenceOf[int], params: SamplingParams = GREEDY, **rest: object):
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, **rest)  # type: ignore[arg-type]


def requests(count: int, seed: int = 0, **rest: object) -> list[Request]:
    """Random prompts, half of which begin alike, with all kinds of sampling."""
    rng = random.Random(seed)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    made = []
    for i in range(count):
        shared = common[: rng.randrange(40)] if rng.random() < 0.5 else []
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
        made.append(ask(str(i), shared + own, SAMPLINGS[i % len(SAMPLINGS)], **rest))
    return made


@cache
def plain_answers(window: int | None = None) -> dict[tuple[str, int], list[int]]:
    return World(drafting=False, window=window).run(*requests(24))


@pytest.mark.parametrize(
    ("num_blocks", "max_rows", "window", "prefix_caching", "seed"),
    [
        (18, 16, None, True, None),
        (18, 3, None, True, 1),
        (18, 7, 6, True, 2),
        (18, 16, 6, False, 3),
        (18, 3, None, False, None),
        (200, 3, None, True, 4),
        (200, 16, 6, True, None),
    ],
)
def test_every_draft_of_a_model_that_equals_the_target_holds(
    num_blocks: int, max_rows: int, window: int | None, prefix_caching: bool, seed: int | None
) -> None:
    world = World(
        max_rows=max_rows,
        seed=seed,
        num_blocks=num_blocks,
        window=window,
        prefix_caching=prefix_caching,
    )
    assert world.run(*requests(24)) == plain_answers(window)
    world.check_all_held()
    assert 0 < world.drafts.largest_catch_up <= max_rows
    assert (world.engine.stats.num_preemptions > 0) == (num_blocks == 18)


class Wayward(HistoryExecutor):
    """The target's rows, but of every other history those of another token."""

    def logits(self, hidden, rows):
        logits = super().logits(hidden, rows)
        return torch.stack([row.roll(int(1e3 * row[5]) % 2) for row in logits])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_drafts_of_which_some_hold_are_those_of_a_fresh_model(seed: int) -> None:
    world = World(num_blocks=24, max_rows=9, seed=seed)
    config = world.engine.config
    world.source._executor = Wayward(config)
    propose = world.source.propose

    def checked(wants: SequenceOf[Want]) -> list[Draft | None]:
        drafts = propose(wants)
        for want, draft in zip(wants, drafts, strict=True):
            if draft is None:
                continue
            fresh, _ = make_source(config, max_rows=1000)
            fresh._executor = Wayward(config)
            copy = replace(want.sequence, block_ids=[list(range(1, 24))])
            limit = len(draft.tokens)
            assert fresh.propose([Want(sequence=copy, limit=limit)]) == [draft]
        return drafts

    world.source.propose = checked  # type: ignore[method-assign]
    assert world.run(*requests(24)) == plain_answers()
    assert world.source.figures["faults"] == 0
    ends = [events[-1] for events in world.events.values()]
    num_held, num_drafts = (
        sum(getattr(end, name) for end in ends)
        for name in ("num_accepted_tokens", "num_draft_tokens")
    )
    assert 0.1 < num_held / num_drafts < 0.9


def test_four_drafts_a_step_make_nearly_five_tokens_a_step() -> None:
    world = World()
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)
    (tokens,) = world.run(ask("a", [5, 6, 7], params)).values()
    assert len(tokens) / (world.num_steps - 1) >= 4.5  # one step for the prompt
    world.check_all_held()


@pytest.mark.parametrize("num_scratch", [0, 1])
def test_without_scratch_a_draft_ends_with_the_blocks(num_scratch: int) -> None:
    world = World(num_scratch=num_scratch)
    assert world.run(*requests(24)) == plain_answers()
    world.check_all_held()


def test_requests_that_are_aborted_leave_nothing() -> None:
    world, rng = World(num_blocks=24, max_rows=5), random.Random(5)
    for request in requests(40, seed=3):
        world.engine.add(request)
        if rng.random() < 0.5:
            world.engine.abort(str(rng.randrange(int(request.request_id) + 1)))
        world.engine.step()
        world.engine.scheduler.check_integrity()
    world.run()
    assert world.source.figures["faults"] == 0
    world.source.check_integrity([])
    assert world.engine.stats.kv_usage == 0


def test_siblings_draft_from_the_blocks_that_they_share() -> None:
    params = SamplingParams(temperature=1.0, seed=8, n=3, max_tokens=16)
    asked = [ask(str(i), range(3, 30 + i), params) for i in range(3)]
    world = World(max_rows=9)
    assert world.run(*asked) == World(drafting=False).run(*asked)
    world.check_all_held()


def test_blocks_that_were_drafted_in_are_taken_over_and_others_computed() -> None:
    world, prompt = World(max_rows=100), list(range(3, 44))  # 10 full blocks of 4, and a token
    catch_up = []
    for name, salt in (("unseen", "x"), ("first", ""), ("second", "")):
        before = world.source.figures["catch_up_rows"]
        world.run(ask(name, prompt, cache_salt=salt))
        catch_up.append(world.source.figures["catch_up_rows"] - before)
    assert world.engine.stats.prefix_hits == 40  # of the second alone
    assert catch_up == [41, 41, 1]
    world.check_all_held()


def test_a_prefix_hit_without_draft_kv_is_caught_up_in_chunks() -> None:
    world, prompt = World(max_rows=8), list(range(3, 44))
    world.run(ask("first", prompt, speculation=Speculation(enabled=False)))
    assert world.source.figures["rows"] == 0
    params = replace(GREEDY, max_tokens=30, ignore_eos=True)
    world.run(ask("second", prompt, params))
    assert world.engine.stats.prefix_hits == 40
    assert world.drafts.largest_catch_up == 8
    world.check_all_held()


def test_adapters_of_the_draft_model_follow_those_of_the_target(tmp_path: Path) -> None:
    """Generations have one name in both models here, so that both compute the same."""
    digests = {"a": "ka", "b": "kb"}

    def uses(i: int, *, drafting: bool) -> tuple[AdapterUse, ...]:
        name = ("a", "b", None)[i % 3]
        if name is None:
            return ()
        active_from = 6 if i % 2 else 0
        draft = name if drafting else ""
        return (
            AdapterUse(
                generation=name,
                kv_digest=digests[name],
                scale=0.5 + i % 2,
                active_from=active_from,
                draft=draft,
            ),
        )

    def world(folder: str, **rest: object) -> World:
        (tmp_path / folder).mkdir()
        made = World(root=tmp_path / folder, max_rows=7, num_blocks=60, **rest)
        for generation, digest in digests.items():
            message = made.files.write(generation, device_bytes=8, kv_digest=digest)
            made.engine.load_adapter(message)
            while not (answers := made.engine.take_adapter_results()):
                made.engine.step()
            assert answers[0].error is None
            adapter = made.files.load(generation, Path(message.directory), allow_zero_delta=False)
            made.executor.place_adapter(adapter)
        return made

    asked = requests(24, seed=2)
    plain = world("plain", drafting=False).run(
        *(replace(r, adapters=uses(i, drafting=True)) for i, r in enumerate(asked))
    )
    for folder, drafting in (("own", True), ("none", False)):
        drafts = world(folder)
        got = drafts.run(
            *(replace(r, adapters=uses(i, drafting=drafting)) for i, r in enumerate(asked))
        )
        assert got == plain
        assert drafts.source.figures["faults"] == 0
        held = [e[-1].num_accepted_tokens == e[-1].num_draft_tokens for e in drafts.events.values()]
        assert all(held) == drafting


def test_nothing_is_drafted_behind_the_context_of_the_draft_model() -> None:
    world = World()
    world.source, _ = make_source(world.engine.config, context_length=20)
    world.drafts.source = world.source
    params = replace(GREEDY, max_tokens=40, ignore_eos=True)
    got = world.run(ask("a", range(3, 10), params))
    assert got == World(drafting=False).run(ask("a", range(3, 10), params))
    world.check_all_held()
    # The last row is that of position 19, and it predicts token 20.
    assert 7 < world.events["a", 0][-1].num_draft_tokens <= 20 - 7


class Narrow(HistoryExecutor):
    """A model that lacks the vocabulary's last tokens."""

    def forward(self, batch, embeds=None):
        assert batch.token_ids.max() < self.model.vocab_size
        return super().forward(batch, embeds)

    def logits(self, hidden, rows):
        return super().logits(hidden, rows)[:, : self.model.vocab_size]


def test_a_trimmed_vocabulary_drafts_what_it_has() -> None:
    world = World()
    narrow = replace(world.engine.config.model, vocab_size=40)
    world.source._executor = Narrow(replace(world.engine.config, model=narrow))
    world.source.model = narrow
    assert world.run(*requests(24)) == plain_answers()
    assert world.source.figures["faults"] == 0
    assert sum(e[-1].num_accepted_tokens for e in world.events.values()) > 0


def test_faults_cost_drafts_and_no_request() -> None:
    world, asked = World(), requests(24)
    world.executor.poison = {t for r in asked for t in r.prompt_token_ids}
    assert world.run(*asked) == plain_answers()
    assert world.source.is_off
    assert world.source.figures["faults"] == MAX_FAULTS
    assert all(e[-1].num_draft_tokens == 0 for e in world.events.values())


def test_logits_that_are_not_finite_end_a_draft() -> None:
    world = World()
    world.executor.nan_on = set(range(30))
    assert world.run(*requests(24)) == plain_answers()
    world.check_all_held()


def sequence(prompt: SequenceOf[int], params: SamplingParams = GREEDY) -> Sequence:
    made = Sequence(
        seq_id=0,
        request=ask("a", prompt, params),
        index=0,
        arrival=0,
        tokens=list(prompt),
        max_total_tokens=100,
        seed=1,
    )
    made.block_ids = [list(range(1, 2 + len(prompt) // 4))]
    return made


def test_drafts_of_others_are_gone_on_behind() -> None:
    config = engine_config()
    forced = (9, 8, 7)
    source, _ = make_source(config)
    (behind,) = source.propose([Want(sequence=sequence([5, 6, 7]), after=forced, limit=3)])
    source, _ = make_source(config)
    (whole,) = source.propose([Want(sequence=sequence([5, 6, 7, *forced]), limit=3)])
    assert isinstance(behind, Draft)
    assert behind == whole


def test_the_grammar_masks_each_depth_and_chances_are_the_models_own() -> None:
    asked: list[tuple[int, ...]] = []

    def mask(_: Sequence, drafts: tuple[int, ...], row) -> bool:
        asked.append(drafts)
        row[torch.arange(VOCAB_SIZE).numpy() % 3 != len(drafts) % 3] = -float("inf")
        return len(drafts) < 3

    source, _ = make_source(engine_config())
    source._mask = mask
    constrained = sequence([5, 6, 7])
    constrained.request = replace(constrained.request, grammar=object())  # type: ignore[arg-type]
    (draft,) = source.propose([Want(sequence=constrained, limit=9)])
    assert draft is not None
    assert [token % 3 for token in draft.tokens] == [0, 1, 2]
    assert asked == [draft.tokens[:i] for i in range(4)]
    assert all(1 / VOCAB_SIZE < chance < 1 for chance in draft.chances)


def test_a_draft_that_hardly_holds_ends() -> None:
    source, _ = make_source(engine_config())
    (whole,) = source.propose([Want(sequence=sequence([5, 6, 7]), limit=8)])
    assert whole is not None
    source.floor = whole.chances[0] * whole.chances[1]
    (draft,) = source.propose([Want(sequence=sequence([5, 6, 7]), limit=8)])
    assert draft is not None
    assert draft.tokens == whole.tokens[:3]
