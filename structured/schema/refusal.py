"""What cannot be enforced, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A keyword that no backend enforces exactly as it is used here."""

    pointer: str
    keyword: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.keyword!r} at {self.pointer or '/'}: {self.why}; {self.instead}"


class Undecidable(Exception):
    """A question that only the refused keyword could answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
