"""A scheduler in a world without tensors, which sees through every wrong block.

`World` executes plans on a simulated KV cache: a slot holds a node of a trie of token histories,
that is, everything that K and V there depend on. A row may only read slots that hold its own
history. The "model" is a function of the history, so that every sequence has one right answer,
whatever the batch mix, chunking, preemption or drafts: `finish` compares.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from support.histories import VOCAB_SIZE, Histories, answer, next_token, stop

from plait.platform.batch import build
from plait.platform.core import (
    AdapterUse,
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    SequenceState,
    Span,
    SpanResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from plait.platform.kv.hashing import KeyChain
from plait.platform.scheduler import Commit, Scheduler
from plait.platform.scheduling.unbroken import longest


class World:
    """Drives one scheduler and checks everything that can be checked after each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tables = scheduler._tables
        self.block_size = self.tables.block_size
        self.histories = Histories()
        self.memory: list[dict[int, int]] = [{} for _ in self.tables.pools]
        self.contents: dict[bytes, int] = {}  # key → node of the block's last token
        self.live: dict[str, list[Sequence]] = {}
        self.ended: dict[int, Sequence] = {}
        self.outputs: Counter[int] = Counter()
        self.prompt_logprobs: dict[int, list[int]] = {}
        self.num_rows = 0
        self.now_s = 0.0
        self.num_requests = 0
        self.refusals = {"lora_storage_unavailable"}  # codes of strands

    # --- what users do -------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        priority: int = 0,
        salt: str = "",
        adapters: tuple[AdapterUse, ...] = (),
        tenant: str = "",
        share: float = 1.0,
        deadline_s: float | None = None,
        seed: int = 1,
        request_id: str | None = None,
        fields: dict[str, Any] | None = None,
        **params: object,
    ) -> list[Sequence]:
        self.num_requests += 1
        request = Request(
            request_id=request_id or f"r{self.num_requests}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, **params),
            priority=priority,
            cache_salt=salt,
            adapters=adapters,
            tenant=tenant,
            share=share,
            deadline_s=deadline_s,
            **(fields or {}),
        )
        total = len(prompt) + max_tokens
        sequences = self.scheduler.add(request, seed=seed, max_total_tokens=total)
        self.live[request.request_id] = sequences
        return sequences

    def abort(self, request_id: str) -> None:
        unfinished = [s for s in self.live.get(request_id, ()) if s.seq_id not in self.ended]
        ended = self.scheduler.abort(request_id)
        assert ended == unfinished
        assert all(s.finish_reason is FinishReason.ABORT for s in ended)
        self._end(ended)

    # --- a step ----------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now_s)
        if plan is None:
            assert not self.scheduler.num_unfinished or self.scheduler._strands.busy
            return None
        assert plan.spans or plan.finished, "contract 5: nothing runs and nothing ends"
        for sequence in plan.finished:
            assert sequence.finish_reason is FinishReason.ERROR
            if sequence.failure[0] == "deadline_exceeded":
                assert sequence.request.deadline_s <= self.now_s
            else:
                assert sequence.failure[0] in self.refusals, sequence.failure
        self._end(plan.finished)
        self._check_plan(plan)
        return plan

    def execute(self, plan: StepPlan) -> None:
        """Write the K and V of all rows, then let each row read what it sees."""
        if not plan.spans:
            return
        batch = build(plan, self.block_size)
        paths = [self._path(span) for span in plan.spans]
        for memory, slots in zip(self.memory, batch.slot_mapping, strict=True):
            assert len(set(slots.tolist())) == len(slots), "two rows write one slot"
            written = [
                node
                for span, path in zip(plan.spans, paths, strict=True)
                for node in path[span.start : span.start + span.num_tokens]
            ]
            memory.update(zip(slots.tolist(), written, strict=True))
        for s, (span, path) in enumerate(zip(plan.spans, paths, strict=True)):
            for g, memory in enumerate(self.memory):
                window = self.tables.windows[g]
                start = 0 if window is None else max(0, span.start - window + 1)
                table = batch.block_tables[g][s].tolist()
                for position in range(start, span.start + span.num_tokens):
                    block = table[position // self.block_size]
                    slot = block * self.block_size + position % self.block_size
                    assert block, f"{span}: position {position} is in the null block"
                    assert memory.get(slot) == path[position], f"{span}: foreign KV at {position}"
        self.num_rows += plan.num_rows

    def commit(self, plan: StepPlan, failing: Sequence | None = None) -> list[Commit]:
        before = {s.seq_id for s in self.ended.values()}
        results = tuple(
            SpanResult(error="NaN") if span.sequence is failing else self._result(span)
            for span in plan.spans
        )
        in_plan = {span.sequence.seq_id: span for span in plan.spans}
        commits = self.scheduler.commit(plan, StepResult(spans=results), stop)
        for commit in commits:
            sequence = commit.sequence
            assert sequence.seq_id not in before, "a result for a sequence that had ended"
            assert commit.error == sequence.failure
            assert commit.error or sequence.seq_id in in_plan
            self.outputs[sequence.seq_id] += len(commit.token_ids)
            assert not sequence.drafts
            given = self.prompt_logprobs.setdefault(sequence.seq_id, [])
            given += [each.token_id for each in commit.prompt_logprobs]
            if sequence.finish_reason is not None:
                self._end([sequence])
        return commits

    def step(
        self,
        *,
        rng: random.Random | None = None,
        fails: bool = False,
        abort: str | None = None,
    ) -> StepPlan | None:
        """One step; with `rng`, running sequences get drafts of random quality."""
        if rng is not None:
            self._propose(rng)
        plan = self.plan()
        if plan is None:
            return None
        self.execute(plan)
        if abort is not None:
            self.abort(abort)
        failing = None
        if fails and plan.spans:
            failing = (rng or random.Random(0)).choice(plan.spans).sequence
        self.commit(plan, failing)
        self.check()
        return plan

    def drain(self, rng: random.Random | None = None) -> int:
        """Run until nothing is left, within bounded steps; every block is free then."""
        left = [s for sequences in self.live.values() for s in sequences]
        bound = 20 + 20 * sum(s.max_total_tokens for s in left)
        steps = 0
        while self.step(rng=rng) is not None or self.scheduler.num_unfinished:
            self.between_steps()
            steps += 1
            assert steps <= bound, "starvation"
        assert not self.live
        assert self.scheduler.kv_usage == 0.0
        scheduler, sequences = self.scheduler, self.scheduler._sequences
        assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
        for kept in (sequences.requests, sequences.prompt_rows, self.tables._records):
            assert not len(kept), "something of an ended sequence is kept"
        assert not sequences.requests.num_queued
        return steps

    def between_steps(self) -> None:
        """What else goes on while `drain` steps: nothing here."""

    # --- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that holds between steps."""
        self.scheduler.check_integrity()
        self._learn_keys()
        for pool, memory in zip(self.tables.pools, self.memory, strict=True):
            for key, block in pool._by_key.items():
                node: object = self.contents[key]
                for slot in reversed(range(block * self.block_size, (block + 1) * self.block_size)):
                    assert memory[slot] == node, "I4: a block's key does not tell its content"
                    node = self.histories.parents[node]

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler._config
        wholes = [longest(span.sequence.request.spans) for span in plan.spans]
        # The last one chosen may have to be whole, where at least one row was left.
        assert plan.num_rows <= config.max_num_batched_tokens - 1 + max(wholes, default=1)
        assert len(plan.spans) <= config.max_num_seqs
        assert len({span.sequence.seq_id for span in plan.spans}) == len(plan.spans)
        for span in plan.spans:
            sequence = span.sequence
            known = span.start + span.num_tokens - len(span.drafts)
            assert sequence.state is SequenceState.RUNNING
            assert span.start == sequence.num_computed_tokens
            assert known > span.start
            for begin, end in sequence.request.spans:
                assert not begin < known < end, "a span of tokens that see each other is cut"
            assert known <= len(sequence.tokens)
            assert not span.drafts or known == len(sequence.tokens)
            at_end = known == len(sequence.tokens) and known < sequence.max_total_tokens
            assert span.num_samples == (1 + len(span.drafts) if at_end else 0)
            assert known + span.num_samples <= sequence.max_total_tokens
            for g, pool in enumerate(self.tables.pools):
                first, last = span.start, span.start + span.num_tokens - 1
                for i in range(first // self.block_size, last // self.block_size + 1):
                    block = span.block_ids[g][i]
                    assert pool.references(block) == 1, "I3: a shared block is written"
                    assert pool.key(block) is None, "I3: a published block is written"

    def _learn_keys(self) -> None:
        if not self.tables.is_caching:
            return
        for sequences in self.live.values():
            for sequence in sequences:
                self._learn(sequence)

    def _learn(self, sequence: Sequence) -> None:
        # From scratch, so that a chain gone wrong inside the scheduler shows.
        path = self.histories.path(sequence.request, sequence.tokens)
        keys = KeyChain(sequence.request, self.block_size).extend(
            sequence.tokens, len(path) // self.block_size
        )
        for i, key in enumerate(keys):
            node = path[(i + 1) * self.block_size - 1]
            assert self.contents.setdefault(key, node) == node, "I5: one key, two contents"

    def _end(self, sequences: list[Sequence] | tuple[Sequence, ...]) -> None:
        for sequence in sequences:
            assert sequence.seq_id not in self.ended, "a sequence ended twice"
            assert sequence.state is SequenceState.FINISHED
            assert not any(sequence.block_ids)
            self.ended[sequence.seq_id] = sequence
            if self.tables.is_caching:
                self._learn(sequence)
            self._check_answer(sequence)
            siblings = self.live[sequence.request.request_id]
            if all(s.seq_id in self.ended for s in siblings):
                del self.live[sequence.request.request_id]

    def _check_answer(self, sequence: Sequence) -> None:
        expected, output = answer(sequence), sequence.output_token_ids
        assert self.outputs[sequence.seq_id] == len(output)
        if sequence.finish_reason in {FinishReason.ABORT, FinishReason.ERROR}:
            assert output == expected[: len(output)]
            return
        assert output == expected
        stopped = bool(output) and stop(sequence, output[-1]) is not None
        assert sequence.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        if sequence.request.params.prompt_logprobs is not None and sequence.index == 0:
            given = self.prompt_logprobs[sequence.seq_id]
            assert given == list(sequence.request.prompt_token_ids[1:])

    # --- the model -------------------------------------------------------------------------------

    def _path(self, span: Span) -> list[int]:
        known_end = span.start + span.num_tokens - len(span.drafts)
        tokens = [*span.sequence.tokens[:known_end], *span.drafts]
        return self.histories.path(span.sequence.request, tokens)

    def _result(self, span: Span) -> SpanResult:
        sequence, accepted = span.sequence, []
        for i in range(span.num_samples):
            accepted.append(next_token(sequence.seed, [*sequence.tokens, *accepted]))
            if span.drafts[i : i + 1] != (accepted[-1],):
                break
        prompt = sequence.request.prompt_token_ids
        seen = prompt[span.start + 1 : span.start + span.num_tokens + 1]
        return SpanResult(
            token_ids=tuple(accepted),
            prompt_logprobs=tuple(TokenLogprobs(token_id=t, logprob=-1.0, rank=1) for t in seen)
            if span.wants_prompt_logprobs
            else (),
        )

    def _propose(self, rng: random.Random) -> None:
        for sequence in self.scheduler._sequences.running:
            tokens = list(sequence.tokens)
            for _ in range(rng.randrange(5)):
                guess = next_token(sequence.seed, tokens)
                tokens.append(guess if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE))
            sequence.drafts[:] = tokens[len(sequence.tokens) :]


def computed_rows(world: World, *args: Any, **kwargs: Any) -> int:
    """Rows computed until a request has ended; arguments as `World.add`'s."""
    before = world.num_rows
    world.add(*args, **kwargs)
    world.drain()
    return world.num_rows - before
