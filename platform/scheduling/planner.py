"""Who computes what in a step, and who gets and loses a place for it.

In this order, within the budget of tokens:

    1  running sequences that lack one token (and their drafts)     every one gets its row
    2  running sequences that lack more, in chunks                  by priority, then arrival
    3  waiting sequences for which all strands are ready, and all   by priority, then fair shares
       of whose known tokens get blocks                             (`fairness`)

A chunk ends before a span of `Request.spans`, or covers it whole, if need be beyond the budget: one
step at most is so much longer. It also ends before what a strand has no room for in this step
(`Strand.fit`), and so may be empty: then its sequence runs, and gets no row.

A sequence that a strand is not ready for is passed over, and all of its flow with it; one that
lacks blocks is not: nobody overtakes it. A waiting sequence comes before chunks of a strictly worse
priority, and may park sequences of it to get a place or blocks. What a strand refuses ends its
request.

Why everyone finishes. Say that something runs. Who needs a block takes it from parked sequences,
else from the running one of worst priority that has computed least, which then parks. So the
running sequence of best priority that has computed most is never parked to serve another of its
kind, and it fits alone, as `admission` made sure: it goes on until it ends. Between equals nobody
parks another to be admitted. Where a strand lets it have no row, others that hold what it waits for
have theirs, until they need no more of it; and one that had to park instead lets go of it.

Say that nothing runs, and something waits. Either the first that is asked is ready: all others that
hold blocks are of no better priority, so it gets what it needs of theirs, and runs. Or it is passed
over. Those behind it may lack blocks that it holds, since they are of worse priority; then the plan
is empty, and they give back what they hold of strands. But nothing holds what a strand has against
the best of those that wait for it (`Strand.admit`), so that one becomes ready, and it is asked
before all that are of worse priority, and gets blocks of all others. Until then the strand is
`busy`, and whoever asked for the plan waits a moment.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from plait.platform.core import SequenceState
from plait.platform.errors import PlaitError
from plait.platform.scheduling.unbroken import cut, least

if TYPE_CHECKING:
    from plait.platform.core import Sequence
    from plait.platform.kv.allocator import BlockAllocator
    from plait.platform.kv.reservation import Reservation
    from plait.platform.kv.tables import BlockTables
    from plait.platform.scheduling.choices import Choices
    from plait.platform.scheduling.open_sequences import OpenSequences
    from plait.platform.strand import Strands

# Flows that one step may pass over: asking is cheap, and the queue's bound is near it anyway.
MAX_PASSED_OVER = 256


class Planner:
    """Fills the choices of a step from the open sequences. It keeps nothing between steps.

    `num_slots`: sequences that may run at once, each of which can get a row in each step.
    """

    def __init__(
        self,
        sequences: OpenSequences,
        tables: BlockTables,
        allocator: BlockAllocator,
        strands: Strands,
        *,
        num_slots: int,
    ) -> None:
        self._sequences = sequences
        self._running, self._waiting = sequences.running, sequences.waiting
        self._tables = tables
        self._allocator = allocator
        self._strands = strands
        self._num_slots = num_slots

    def choose(self, step: Choices) -> None:
        """Give rows to whom they go, start and park sequences, end those that strands refuse."""
        self._waiting.begin()
        while True:
            num_parked = len(step.preempted)
            self._choose_running(step)
            self._choose_chunks_and_admissions(step)
            if step.chosen or step.finished or len(step.preempted) == num_parked:
                return
            # Who parked held what those that were asked before it had to wait for: once more.

    def left_over(self, step: Choices) -> int:
        """Rows of a step that no known token wanted, whether drafts took them or nobody."""
        if step.budget <= 0:
            kept_out = len(self._running) < self._num_slots and self._waiting.first() is not None
            if kept_out or any(step.leaves_out(sequence) for sequence in self._running):
                return 0
        num_drafts = sum(len(chosen.drafts) for chosen in step.chosen.values())
        return max(0, step.budget + num_drafts)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each running sequence has its place."""
        assert len(self._running) <= self._num_slots, "too many run"

    # --- running sequences ---------------------------------------------------------------------

    def _choose_running(self, step: Choices) -> None:
        """Sequences that lack one token: each gets its row, drafts get what is left over."""
        rows_kept, fit = len(self._running), self._strands.fit
        for sequence in list(self._running):
            if len(sequence.tokens) - sequence.num_computed_tokens != 1:
                continue
            if sequence.state is not SequenceState.RUNNING:
                continue  # parked for one before it
            rows_kept -= 1
            if not fit(sequence, 1):
                continue
            drafts: tuple[int, ...] = ()
            if sequence.drafts:
                drafts = _usable_drafts(sequence, step.budget - rows_kept - 1)
            # Drafts are a guess: they take free blocks, but nobody's work.
            granted = self._grow(sequence, 1 + len(drafts), reclaim=False)
            if granted or self._grow_or_park(step, sequence, 1):
                step.choose(sequence, 1, drafts[: max(granted, 1) - 1])

    def _choose_chunks_and_admissions(self, step: Choices) -> None:
        if len(step.chosen) == len(self._running) and self._waiting.is_empty:
            return  # as in most steps
        chunks = deque(s for s in self._running if s.seq_id not in step.chosen)
        admitting = True
        while step.budget > 0:
            # Where nothing runs, the one that a strand is ready for may be behind them all.
            many = self._waiting.num_passed_over >= MAX_PASSED_OVER and bool(self._running)
            admitting = admitting and not many
            head = self._waiting.first() if admitting else None
            first = chunks[0] if chunks else None
            if head is not None and (first is None or _is_better(head, first)):
                admitting = self._admit(step, head)
            elif first is not None:
                chunks.popleft()
                if first.state is SequenceState.RUNNING and first.seq_id not in step.chosen:
                    self._choose_chunk(step, first)
            else:
                return

    def _choose_chunk(self, step: Choices, sequence: Sequence) -> None:
        num_tokens = self._fit(step, sequence)
        if num_tokens:
            fewest = least(sequence.request.spans, sequence.num_computed_tokens)
            granted = self._grow_or_park(step, sequence, num_tokens, at_least=fewest)
            self._choose(step, sequence, granted)

    def _fit(self, step: Choices, sequence: Sequence) -> int:
        """Known tokens to compute now: within the budget, but for a span that must be whole."""
        spans, start = sequence.request.spans, sequence.num_computed_tokens
        num_tokens = min(len(sequence.tokens) - start, step.budget)
        if spans:
            num_tokens = max(cut(spans, start, num_tokens), least(spans, start))
        return self._strands.fit(sequence, num_tokens)

    def _choose(self, step: Choices, sequence: Sequence, num_tokens: int) -> None:
        """Compute so many known tokens, or fewer where that would cut a span."""
        num_tokens = cut(sequence.request.spans, sequence.num_computed_tokens, num_tokens)
        if num_tokens:
            step.choose(sequence, num_tokens)

    def _grow(
        self, sequence: Sequence, num_tokens: int, *, reclaim: bool, at_least: int = 1
    ) -> int:
        """Slots for up to `num_tokens` more; how many there are now, 0 for fewer than wanted."""
        if self._tables.covers(sequence, sequence.num_computed_tokens + num_tokens):
            return num_tokens
        reservation = self._allocator.try_grow(
            sequence, num_tokens, reclaim=reclaim, at_least=at_least
        )
        if reservation is None:
            return 0
        reservation.commit()
        return reservation.num_tokens

    def _grow_or_park(
        self, step: Choices, sequence: Sequence, num_tokens: int, *, at_least: int = 1
    ) -> int:
        """As `_grow`, but parks running sequences for it; 0 if it had to park itself."""
        while not (granted := self._grow(sequence, num_tokens, reclaim=True, at_least=at_least)):
            victim = max(self._running, key=_worst_first)
            self._park(step, victim)
            if victim is sequence:
                return 0
        return granted

    def _park(self, step: Choices, sequence: Sequence) -> None:
        step.park(sequence)
        self._sequences.park(sequence)

    # --- admission -------------------------------------------------------------------------------

    def _admit(self, step: Choices, head: Sequence) -> bool:
        """Let the first waiting sequence run, if it can; False: nobody may overtake it."""
        if not self._has_place_for(head):
            return False
        try:
            ready = self._strands.admit(head)
        except PlaitError as error:
            for ended in self._sequences.fail(head.request.request_id, (error.code, error.message)):
                step.finish(ended)
            return True
        if not ready:
            self._waiting.pass_over(head)
            return True
        reservation = self._reserve(step, head)
        if reservation is None:
            self._strands.release(head)
            return False
        reservation.commit()
        self._sequences.start(head)
        self._choose(step, head, min(self._fit(step, head), reservation.num_tokens))
        return True

    def _has_place_for(self, head: Sequence) -> bool:
        if len(self._running) < self._num_slots:
            return True
        return _is_better(head, next(reversed(self._running)))

    def _reserve(self, step: Choices, head: Sequence) -> Reservation | None:
        """A place and blocks, if need be of sequences of worse priority."""
        reservation = self._try_admit(head) if len(self._running) < self._num_slots else None
        if reservation is None and not self._may_park_for(head):
            return None
        while reservation is None:
            self._park(step, max(self._running, key=_worst_first))
            reservation = self._try_admit(head)
        return reservation

    def _try_admit(self, head: Sequence) -> Reservation | None:
        hit_limit = self._sequences.prompt_rows.hit_limit(head)
        return self._allocator.try_admit(head, hit_limit=hit_limit, alone=not self._running)

    def _may_park_for(self, head: Sequence) -> bool:
        """Whether parking only sequences of strictly worse priority makes room for `head`."""
        victims = [s for s in self._running if _is_better(head, s)]
        if not victims:
            return False
        alone = len(victims) == len(self._running)
        hit_limit = self._sequences.prompt_rows.hit_limit(head)
        return self._allocator.could_admit(head, hit_limit=hit_limit, alone=alone, victims=victims)


def _usable_drafts(sequence: Sequence, room: int) -> tuple[int, ...]:
    # All drafts may hold, and one token more comes with them.
    most = min(room, sequence.max_total_tokens - len(sequence.tokens) - 1)
    return tuple(sequence.drafts[: max(0, most)])


def _is_better(one: Sequence, other: Sequence) -> bool:
    return one.request.priority < other.request.priority


def _worst_first(sequence: Sequence) -> tuple[int, int, int, int]:
    """The greatest is parked first: worst priority, then least work to lose, then latest."""
    computed = sequence.num_computed_tokens
    return (sequence.request.priority, -computed, sequence.arrival, sequence.index)
