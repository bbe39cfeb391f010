"""The sequences that have not ended, and the states that they pass through.

    add ──→ WAITING ──start──→ RUNNING ──finish──→ FINISHED     (`finish` from any state)
              ↑  ↑               │
              │  └─────park──────┘
    FORKING ──┘ fork: siblings wait until their leader has computed the prompt

May enter: what changes hands when a state changes. May not enter: why it does; `planner` decides
who starts and who parks, and `platform.scheduler` who has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.platform.core import FinishReason, Sequence, SequenceState
from plait.platform.scheduling.admission import sequence_seed
from plait.platform.scheduling.fairness import FairShares, WaitingSequences
from plait.platform.scheduling.open_requests import OpenRequests
from plait.platform.scheduling.ordering import OrderedSequences
from plait.platform.scheduling.prompt_rows import PromptRows

if TYPE_CHECKING:
    from plait.platform.core import Request
    from plait.platform.kv.tables import BlockTables
    from plait.platform.strand import Strands


class OpenSequences:
    """Owns all unfinished sequences, and tells tables, strands and shares of what they become.

    `running` and `waiting` are disjoint; siblings that have not forked yet are in neither. Others
    read these sets, and only the methods here change them.
    """

    def __init__(self, tables: BlockTables, strands: Strands) -> None:
        self._tables = tables
        self._strands = strands
        self.requests = OpenRequests()
        self.shares = FairShares()
        self.waiting = WaitingSequences(self.shares)
        self.running = OrderedSequences()
        self.prompt_rows = PromptRows()
        self._num_requests = 0  # ever added
        self._num_sequences = 0
        self.num_unfinished = 0
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up, once per request
        self.prefix_hits = 0  # of these found

    def add(self, request: Request, *, seed: int, max_total_tokens: int) -> list[Sequence]:
        """The sequences of a new request: the first waits, and leads its siblings."""
        sequences = [
            Sequence(
                seq_id=self._num_sequences + index,
                request=request,
                index=index,
                arrival=self._num_requests,
                tokens=list(request.prompt_token_ids),
                max_total_tokens=max_total_tokens,
                seed=sequence_seed(seed, index),
                state=SequenceState.FORKING if index else SequenceState.WAITING,
            )
            for index in range(request.params.n)
        ]
        self._num_requests += 1
        self._num_sequences += len(sequences)
        self.num_unfinished += len(sequences)
        self.requests.add(sequences)
        for sequence in sequences:
            self._tables.open(sequence, forks=sequence.index == 0 and len(sequences) > 1)
            self.shares.open(sequence)
        self.waiting.add(sequences[0], resumed=False)
        self.prompt_rows.open(sequences[0])
        return list(sequences)

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence runs; its blocks are in its tables, and its strands are ready."""
        self._count_start(sequence)
        self.waiting.discard(sequence)
        self.running.add(sequence)
        sequence.state = SequenceState.RUNNING

    def _count_start(self, sequence: Sequence) -> None:
        if not self.requests.admitted(sequence.request.request_id):
            return
        self.shares.charge(sequence, prompt=sequence.num_prompt_tokens)
        sequence.num_cached_tokens = sequence.num_computed_tokens
        if self._tables.is_caching and sequence not in self.prompt_rows:
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += sequence.num_cached_tokens

    def park(self, sequence: Sequence) -> None:
        """A running sequence waits again, and keeps its blocks until others take them."""
        self._strands.release(sequence)
        self.running.discard(sequence)
        self.waiting.add(sequence, resumed=True)
        self._tables.park(sequence)
        sequence.state = SequenceState.WAITING
        sequence.drafts.clear()
        sequence.epoch += 1
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def fork(self, leader: Sequence) -> None:
        """The leader's prompt is computed: siblings that have not forked yet wait, and share it."""
        same = self.requests.sequences(leader.request.request_id)
        siblings = [s for s in same if s.state is SequenceState.FORKING]
        if not siblings:
            return
        self._tables.fork(leader, siblings)
        for sibling in siblings:
            sibling.state = SequenceState.WAITING
            sibling.num_cached_tokens = leader.num_cached_tokens
            self.waiting.add(sibling, resumed=True)

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a sequence. All that it holds is free at once."""
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.num_unfinished -= 1
        sequence.drafts.clear()
        self.waiting.discard(sequence)
        self.running.discard(sequence)
        self._strands.release(sequence)
        self._tables.close(sequence)
        self.shares.close(sequence)
        self.prompt_rows.close(sequence)
        self.requests.ended(sequence)

    def fail(self, request_id: str, failure: tuple[str, str]) -> list[Sequence]:
        """End all of a request's sequences for an error (code, message); returns them."""
        ended = self.requests.sequences(request_id)
        for sequence in ended:
            sequence.failure = failure
            self.finish(sequence, FinishReason.ERROR)
        return ended

    def check_integrity(self) -> None:
        """Raise AssertionError unless all states, sets, tables and counts agree."""
        sequences = self.requests.unfinished()
        self.requests.check_integrity()
        self._tables.check_integrity(sequences)
        self.shares.check_integrity(sequences)
        self._strands.check_integrity(self.running)
        for sequence in sequences:
            state = sequence.state
            assert (state is SequenceState.RUNNING) == (sequence in self.running), state
            assert (state is SequenceState.WAITING) == (sequence in self.waiting), state
            parked = sequence in self._tables.parked
            assert not parked or state is SequenceState.WAITING, "parked while it runs"
            assert sequence.num_computed_tokens < len(sequence.tokens), "nothing left to compute"
            assert len(sequence.tokens) <= sequence.max_total_tokens, "too long"
        assert len(sequences) == self.num_unfinished, "miscounted"
