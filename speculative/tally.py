"""What became of drafts, counted for reports. Nothing is decided by these figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.platform.core import Sequence
    from plait.speculative.source import Draft

# Upper ends of the classes in which steps are counted by their rows of drafts; then what is above.
ROW_CLASSES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
# Why a sequence got no drafts in a step.
BY_REQUEST, AT_ITS_END, NO_ROOM = "request", "end", "room"
NOTHING_FOUND, FORBIDDEN, NOT_WORTH_IT, FAULT = "nothing_found", "grammar", "budget", "fault"


class Tally:
    """Counters of one engine, cumulative. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}  # source → [verified, output]
        self._cuts: dict[str, list[int]] = {}  # source → [by the grammar, by the budget]
        self._seconds: dict[str, float] = {}  # by source
        self._in_sources_s = 0.0  # of this step
        self._by_position: list[int] = []  # held, by place in the run
        self._num_runs = 0
        self._steps = [0] * (len(ROW_CLASSES) + 1)
        self._undrafted: Counter[str] = Counter()

    def drafting(self, source: str, seconds: float) -> None:
        """A source was asked, and took so long."""
        self._seconds[source] = self._seconds.get(source, 0.0) + seconds
        self._in_sources_s += seconds

    def following(self, source: str, seconds: float) -> None:
        """A source went along with a step, which took so long beside it."""
        self._seconds[source] = self._seconds.get(source, 0.0) + seconds

    def choosing(self, seconds: float) -> None:
        """All that drafting took in a step, the sources included."""
        self._seconds["budget"] = self._seconds.get("budget", 0.0) + seconds - self._in_sources_s
        self._in_sources_s = 0.0

    def cut(self, drafts: SequenceOf[Draft], num_kept: int, *, by: str) -> None:
        """Of drafts one behind the other only the first `num_kept` tokens stay."""
        place = int(by == NOT_WORTH_IT)
        for draft in drafts:
            num_cut = len(draft.tokens) - max(min(num_kept, len(draft.tokens)), 0)
            num_kept -= len(draft.tokens)
            if num_cut:
                self._cuts.setdefault(draft.source, [0, 0])[place] += num_cut

    def undrafted(self, reason: str, num: int = 1) -> None:
        """So many sequences get no drafts in this step."""
        self._undrafted[reason] += num

    def stepped(self, num_drafts: int) -> None:
        """A step that decodes verified so many drafts."""
        place = next((i for i, most in enumerate(ROW_CLASSES) if num_drafts <= most), -1)
        self._steps[place] += 1

    def verified(self, sequence: Sequence, sources: SequenceOf[str], num_held: int) -> None:
        """A run of drafts, each with its source, was judged; the first `num_held` hold."""
        for source in sources:
            sequence.draft_counts.setdefault(source, [0, 0])[0] += 1
            self._counts.setdefault(source, [0, 0])[0] += 1
        self._num_runs += 1
        self._by_position += [0] * (num_held - len(self._by_position))
        for position in range(num_held):
            self._by_position[position] += 1

    def output(self, sequence: Sequence, source: str) -> None:
        """A draft that holds became part of the answer."""
        sequence.draft_counts[source][1] += 1
        self._counts[source][1] += 1

    def num_verified(self, source: str) -> int:
        """Drafts of a source that were judged."""
        return self._counts.get(source, (0, 0))[0]

    @property
    def figures(self) -> Mapping[str, Any]:
        """Fields of `messages.Stats`."""
        return {
            "drafts": {source: tuple(counts) for source, counts in self._counts.items()},
            "draft_cuts": {source: tuple(cuts) for source, cuts in self._cuts.items()},
            "accepted_by_position": tuple(self._by_position),
            "num_draft_runs": self._num_runs,
            "draft_seconds": dict(self._seconds),
            "steps_by_drafts": tuple(self._steps),
            "undrafted": dict(self._undrafted),
        }
