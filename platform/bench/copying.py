"""Prompts whose answers copy from them: a text to edit, and facts to write as JSON."""

from __future__ import annotations

import random
from collections.abc import Callable

from plait.platform.bench.workload import Shape

_WHO = ("The committee", "Mrs. Henderson", "A young engineer", "The old library", "Our neighbour")
_DID = ("approved a budget of", "paid a bill of", "asked the town for", "lost a case worth")
_FOR = ("repairs to the roof", "a bridge over the river", "lessons in the evening", "new windows")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_NAMES = ("Alice", "Bruno", "Chloe", "Dmitri", "Elena", "Farid", "Grace", "Hiro")
_CITIES = ("Lisbon", "Oslo", "Vienna", "Dublin", "Prague", "Athens")


def copying_texts(shape: Shape, count_tokens: Callable[[str], int], seed: int) -> list[str]:
    """As many as the batch has, edits and JSON in turn, each different.

    What is to be copied has at least `input_tokens` tokens, and so the answer always something.
    """
    rng = random.Random(seed)
    return [_text(rng, i % 2 == 1, shape, count_tokens) for i in range(shape.batch_size)]


def _text(
    rng: random.Random, is_json: bool, shape: Shape, count_tokens: Callable[[str], int]
) -> str:
    text = ""
    while count_tokens(text) < max(shape.input_tokens, shape.output_tokens):
        text += _fact(rng) if is_json else _sentence(rng)
    if is_json:
        return f"Write these people as a JSON list of objects with name, city and year:\n\n{text}"
    old, new = rng.sample(_DAYS, 2)
    return f"Repeat this text exactly, but replace {old} by {new}:\n\n{text}"


def _sentence(rng: random.Random) -> str:
    who, did, what, day = (rng.choice(words) for words in (_WHO, _DID, _FOR, _DAYS))
    return f"On {day}, {who} {did} {rng.randrange(1000, 9999)} dollars for {what}. "


def _fact(rng: random.Random) -> str:
    name, city = rng.choice(_NAMES), rng.choice(_CITIES)
    return f"{name} moved to {city} in {rng.randrange(1950, 2025)}.\n"
