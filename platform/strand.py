"""What a feature does in a step: the shape that adapters, images, drafts and grammars share.

The scheduler holds a list of strands and knows none of them, nor does the engine. A request that
brings nothing for a strand costs nothing there beyond a look at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, Protocol

from plait.platform.core import Request, Sequence, StepPlan
from plait.platform.errors import PlaitError

if TYPE_CHECKING:
    import torch


Veto = Callable[[int], bool]  # whether a token that the mask allows must not be chosen


class RowMasks(Protocol):
    """Which tokens a step's sample rows may become; in the making while the forward pass runs."""

    def wait(self) -> Mapping[int, PlaitError]:
        """Wait until they are made: the one barrier of a step, before sampling.

        Returns the spans, by their place in the plan, whose sequences must end, and why.
        """
        ...

    def masked(self, first_row: int, num_rows: int) -> SequenceOf[bool]:
        """Which of some consecutive sample rows are constrained."""
        ...

    def apply(self, logits: torch.Tensor, first_row: int) -> None:
        """Set forbidden logits of consecutive sample rows to minus infinity, in place."""
        ...

    def veto(self, row: int) -> Veto | None:
        """What forbids further tokens of a sample row, one by one; None if nothing does."""
        ...


class Strand(Protocol):
    """One feature. All calls come from the engine's thread, between or within steps.

    `admit` and `release` pair up: a sequence is admitted before it runs, and released when it
    parks or ends. A parked sequence is admitted anew before it goes on.

    Within a step come `fit`, `stage`, `embeds` and `commit`; a strand that has no part there
    inherits what does nothing.
    """

    takes_images: bool = False  # whether requests with images are its to serve

    # --- whether a sequence may run ---

    def check(self, request: Request) -> None:
        """Raise `PlaitError` where a request that comes in can never be served."""
        del request

    def begin(self, now_s: float) -> None:
        """A plan begins at `now_s` of the engine's clock: let what became ready take effect."""
        del now_s

    def admit(self, sequence: Sequence) -> bool:
        """Reserve what the sequence needs to run; False: not yet, let others pass.

        Raises `PlaitError` where it can never run: the request then ends with that error. A
        second call for a sequence that holds its reservation changes nothing.

        As long as nothing runs, the sequence of the best priority that was told "not yet" first
        must come to be admitted, whatever others of those hold: see `scheduling.planner`. So must
        whoever is asked before it in its flow, for it is not asked until then.
        """
        ...

    def release(self, sequence: Sequence) -> None:
        """Give back what the sequence holds, if anything.

        A sequence whose state is WAITING was admitted but could not run for another reason: it
        goes on waiting, and will be admitted anew. One that is FINISHED never comes again. Any
        other no longer runs, but will be admitted anew some time.
        """

    @property
    def busy(self) -> bool:
        """Whether something is under way that will let a sequence run that cannot now."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until something that is under way has come further, or the time is over."""
        del timeout_s

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly the sequences in `running` hold reservations."""

    # --- a step ---

    def fit(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the next `num_tokens` of a running sequence the plan may compute; 0: none.

        Fewer is told where what comes next has to wait for a later step, and is never a number
        that cuts one of `Request.spans`. As long as nobody else was told that it may compute some
        in this plan, nor holds more of this strand than what it needs to go on, the answer is
        more than 0.
        """
        del sequence
        return num_tokens

    def stage(self, plan: StepPlan) -> RowMasks | None:
        """Begin what the step needs beside its forward pass; masks, where rows need some.

        A plan may be staged again in parts, where computing the whole of it failed.
        """
        del plan
        return None

    def embeds(self, plan: StepPlan) -> torch.Tensor | None:
        """Embeddings of the step's image rows, in their order; None where it has none.

        As with `stage`, a plan may come again in parts. What it raises fails the step for those
        alone whose parts raise it again.
        """
        del plan
        return None

    def commit(self, sequence: Sequence, token_id: int) -> bool:
        """`token_id` was appended to `sequence`; True: its answer is complete with it.

        Raises `PlaitError` where the sequence must end for it.
        """
        del sequence, token_id
        return False

    # --- figures ---

    @property
    def figures(self) -> Mapping[str, Any]:
        """Its fields of `messages.Stats`."""
        return {}


class Strands:
    """Several strands as one: a sequence holds its reservations of all of them or of none."""

    def __init__(self, strands: SequenceOf[Strand]) -> None:
        self._strands = tuple(strands)
        # In each step, for each of its sequences, only those are asked that have a say.
        self._beginning = self._overriding("begin")
        self._fitting = self._overriding("fit")
        self._staging = self._overriding("stage")
        self._embedding = self._overriding("embeds")
        self._committing = self._overriding("commit")

    def _overriding(self, name: str) -> tuple[Strand, ...]:
        inherited = getattr(Strand, name)
        return tuple(s for s in self._strands if getattr(type(s), name) is not inherited)

    @property
    def takes_images(self) -> bool:
        """See `Strand.takes_images`."""
        return any(strand.takes_images for strand in self._strands)

    def check(self, request: Request) -> None:
        """See `Strand.check`."""
        for strand in self._strands:
            strand.check(request)

    def fit(self, sequence: Sequence, num_tokens: int) -> int:
        """See `Strand.fit`; the least of all."""
        for strand in self._fitting:
            num_tokens = strand.fit(sequence, num_tokens)
            if not num_tokens:
                break
        return num_tokens

    def embeds(self, plan: StepPlan) -> torch.Tensor | None:
        """See `Strand.embeds`. One strand alone may have some."""
        made = [rows for s in self._embedding if (rows := s.embeds(plan)) is not None]
        assert len(made) <= 1, "embeddings of two strands"
        return made[0] if made else None

    def begin(self, now_s: float) -> None:
        """See `Strand.begin`."""
        for strand in self._beginning:
            strand.begin(now_s)

    def admit(self, sequence: Sequence) -> bool:
        """See `Strand.admit`."""
        for i, strand in enumerate(self._strands):
            if not strand.admit(sequence):
                for earlier in self._strands[:i]:
                    earlier.release(sequence)
                return False
        return True

    def release(self, sequence: Sequence) -> None:
        """See `Strand.release`. No error where nothing is held."""
        for strand in self._strands:
            strand.release(sequence)

    @property
    def busy(self) -> bool:
        """See `Strand.busy`."""
        return any(strand.busy for strand in self._strands)

    def wait(self, timeout_s: float) -> None:
        """See `Strand.wait`; the time is each strand's that is busy."""
        for strand in self._strands:
            if strand.busy:
                strand.wait(timeout_s)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """See `Strand.check_integrity`."""
        running = list(running)
        for strand in self._strands:
            strand.check_integrity(running)

    def stage(self, plan: StepPlan) -> RowMasks | None:
        """See `Strand.stage`. One strand alone may mask rows."""
        staged = [masks for strand in self._staging if (masks := strand.stage(plan)) is not None]
        assert len(staged) <= 1, "masks of two strands"
        return staged[0] if staged else None

    def commit(self, sequence: Sequence, token_id: int) -> bool:
        """See `Strand.commit`."""
        complete = False
        for strand in self._committing:
            complete |= strand.commit(sequence, token_id)
        return complete

    @property
    def figures(self) -> dict[str, Any]:
        """See `Strand.figures`."""
        return {name: value for s in self._strands for name, value in s.figures.items()}
