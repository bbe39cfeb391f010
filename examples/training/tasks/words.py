"""Words that examples are made of. Those behind the first `HELD_IN` of each list are for tests.

So a test asks about people, things and phrases that no training example had.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Split = Literal["train", "test"]
HELD_IN = 0.75  # share of each list that training may use

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Example:
    """What a user says, and what the adapter should answer."""

    prompt: str
    answer: str


class Picker:
    """Draws from lists, only from the part that belongs to a split."""

    def __init__(self, split: Split, seed: int) -> None:
        self.rng = random.Random(f"{split} {seed}")
        self.split = split

    def one(self, items: Sequence[T]) -> T:
        """One of the split's items."""
        border = max(1, round(len(items) * HELD_IN))
        return self.rng.choice(items[:border] if self.split == "train" else items[border:])

    def any(self, items: Sequence[T]) -> T:
        """One of all items: of words that both splits share."""
        return self.rng.choice(items)


FIRST_NAMES = (
    "Anna", "Omar", "Lucia", "Peter", "Mei", "Jonas", "Fatima", "Diego", "Ingrid", "Tomas",
    "Priya", "Hugo", "Elena", "Kofi", "Sara", "Marco", "Yuki", "Ivan", "Nora", "Ahmed",
    "Clara", "Felix", "Rosa", "Emil", "Leila", "Oscar", "Greta", "Pavel", "Zoe", "Samuel",
    "Hanna", "Luis", "Vera", "Bruno", "Aisha", "Karl", "Maya", "Stefan", "Olga", "Ravi",
    "Julia", "Andrei", "Amara", "Finn", "Irene", "Mateo", "Salma", "Viktor", "Edith", "Noah",
)  # fmt: skip
LAST_NAMES = (
    "Lee", "Haddad", "Moreno", "Novak", "Chen", "Berg", "Karimi", "Silva", "Larsen", "Kowalski",
    "Sharma", "Dubois", "Petrov", "Mensah", "Lindqvist", "Rossi", "Tanaka", "Volkov", "Quinn",
    "Farouk", "Weber", "Marsh", "Santos", "Holm", "Azizi", "Grant", "Steiner", "Horak", "Price",
    "Okafor", "Keller", "Vega", "Orlov", "Ferrari", "Nasser", "Brandt", "Patel", "Ilic", "Sokolova",
    "Iyer", "Fontaine", "Popescu", "Diallo", "Murphy", "Castellano", "Ortiz", "Rahman", "Toth",
    "Whitfield", "Bennett",
)  # fmt: skip
PRODUCTS = (
    "desk lamp", "coffee grinder", "rain jacket", "phone case", "garden hose", "office chair",
    "water bottle", "winter boots", "bluetooth speaker", "toaster", "yoga mat", "bike helmet",
    "keyboard", "backpack", "air fryer", "wall clock", "electric kettle", "running shoes",
    "photo frame", "vacuum cleaner", "sleeping bag", "camping stove", "hair dryer", "game console",
    "picnic blanket", "tool box", "frying pan", "alarm clock", "book shelf", "tea pot",
    "umbrella", "headphones", "dinner plates", "laptop stand", "fish tank", "sewing machine",
)  # fmt: skip
