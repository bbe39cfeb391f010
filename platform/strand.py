"""What a feature does in a step: the shape that adapters, images, drafts and grammars share.

The scheduler holds a list of strands and knows none of them. A request that brings nothing for a
strand costs nothing there beyond one call at its admission.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        """

    def release(self, sequence: Sequence) -> None:
        """Give back what the sequence holds, if anything."""

    @property
    def busy(self) -> bool:
        """Whether something is under way that will let a sequence run that cannot now."""

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly the sequences in `running` hold reservations."""
