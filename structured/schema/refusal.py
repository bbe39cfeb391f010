"""What cannot be enforced, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Refusal:
    """A keyword that no backend enforces exactly as it is used here.

    `denial`: what cannot be said is the opposite of the keyword, as `oneOf`, `not` and `if` ask.
    """

    pointer: str
    keyword: str
    why: str
    instead: str
    denial: bool = field(default=False, compare=False)

    def placed(self, at: str) -> Refusal:
        """The same; where it was found inside of the schema at `at` unless it says where."""
        return self if self.pointer else replace(self, pointer=f"{at}/{self.keyword}")

    def __str__(self) -> str:
        return f"{self.keyword!r} at {self.pointer or '/'}: {self.why}; {self.instead}"


class Undecidable(Exception):
    """A question that only the refused keyword could answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
