"""What a feature does in a step: the shape that adapters, images, drafts and grammars share.

The scheduler holds a list of strands and knows none of them. A request that brings nothing for a
strand costs nothing there beyond one call at its admission.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from plait.platform.core import Sequence


class Strand(Protocol):
    """One feature. All calls come from the engine's thread, between or within steps.

    `admit` and `release` pair up: a sequence is admitted before it runs, and released when it
    parks or ends. A parked sequence is admitted anew before it goes on.
    """

    def begin(self, now_s: float) -> None:
        """A plan begins at `now_s` of the engine's clock: let what became ready take effect."""

    def admit(self, sequence: Sequence) -> bool:
        """Reserve what the sequence needs to run; False: not yet, let others pass.

        Raises `PlaitError` where it can never run: the request then ends with that error. A
        second call for a sequence that holds its reservation changes nothing.

        As long as nothing runs, the sequence of the best priority that was told "not yet" first
        must come to be admitted, whatever others of those hold: see `scheduler`.
        """

    def release(self, sequence: Sequence) -> None:
        """Give back what the sequence holds, if anything.

        A sequence whose state is WAITING was admitted but could not run for another reason: it
        goes on waiting, and will be admitted anew. Any other no longer runs.
        """

    @property
    def busy(self) -> bool:
        """Whether something is under way that will let a sequence run that cannot now."""

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly the sequences in `running` hold reservations."""


class Strands:
    """Several strands as one: a sequence holds its reservations of all of them or of none."""

    def __init__(self, strands: SequenceOf[Strand]) -> None:
        self._strands = tuple(strands)

    def begin(self, now_s: float) -> None:
        """See `Strand.begin`."""
        for strand in self._strands:
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

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """See `Strand.check_integrity`."""
        running = list(running)
        for strand in self._strands:
            strand.check_integrity(running)
