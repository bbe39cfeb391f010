"""What a benchmark asks: prompts of a given length, the same for everyone who is compared."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.platform.errors import ConfigError

# Everyday words, nearly all one token in common vocabularies.
_WORDS = (  # noqa: SIM905
    "the of and to in is that it was for on are as with they be at one have this from by hot "
    "word but what some we can out other were all there when up use your how said each she "
    "which do their time if will way about many then them write would like so these her long "
    "make thing see him two has look more day could go come did number sound no most people "
    "my over know water than call first who may down side been now find any new work part take "
    "get place made live where after back little only round man year came show every good me "
    "give our under name very through just form sentence great think say help low line"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one measurement."""

    batch_size: int
    input_tokens: int
    output_tokens: int


def random_token_prompts(
    shape: Shape, *, vocab_size: int, avoid: Sequence[int], seed: int
) -> list[list[int]]:
    """Prompts of random token ids, without those in `avoid` (end tokens)."""
    rng = random.Random(seed)
    avoided = set(avoid)
    allowed = [token for token in range(vocab_size) if token not in avoided]
    return [rng.choices(allowed, k=shape.input_tokens) for _ in range(shape.batch_size)]


def random_texts(count: int, num_words: int, *, seed: int) -> list[str]:
    """Texts of random words, for servers whose vocabulary is not known here."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(_WORDS, k=num_words)) for _ in range(count)]


def texts_of_file(path: Path, count: int) -> list[str]:
    """The first `count` lines of a file that are not empty, from the top again when it ends."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read --prompt-file {path}: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"--prompt-file {path} has no line of text")
    return [lines[i % len(lines)] for i in range(count)]


def arrivals(rate_per_s: float, *, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive: a Poisson process."""
    rng = random.Random(seed)
    now = 0.0
    while True:
        yield now
        now += rng.expovariate(rate_per_s)
