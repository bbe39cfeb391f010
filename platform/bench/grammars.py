"""Times of compiling and of masks on the embedded model's vocabulary.

python -m plait.platform.bench.grammars
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.structured.compiler import COMMON, Compiler
from plait.structured.matcher import MatcherStore
from plait.structured.pool import CompilePool
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plait.structured.matcher import Matcher


def main() -> int:
    """Print one line for each figure."""
    vocabulary = _vocabulary()
    store = MatcherStore()
    _say("libraries and vocabulary, seconds", [_timed(lambda: store.warm(vocabulary))], scale=1)
    pool = CompilePool(vocabulary)
    try:
        specs = [_spec(number) for number in range(200)]
        first = _timed(lambda: pool.compile_blocking(specs[0]))
        _say("pool start to first grammar, seconds", [first], scale=1)
        _say("compile through the pool, ms", [_asked(pool, spec) for spec in specs[1:]])
    finally:
        pool.close()
    compiler = Compiler(vocabulary)
    for backend in ("xgrammar", "llguidance"):
        loads: list[float] = []
        fills: list[float] = []
        chains: list[float] = []
        copies: list[float] = []
        for spec in specs[:40]:
            compiled = compiler.compile(spec)
            if compiled.backend != backend:
                continue
            loads.append(_timed(partial(store.open, compiled, vocabulary)))
            for seed in range(3):
                matcher = store.open(compiled, vocabulary)
                copies.append(_timed(matcher.copy))
                _walk(matcher, np.random.default_rng(seed), fills, chains)
        _say(f"{backend}: load, ms", loads)
        _say(f"{backend}: copy, µs", copies, scale=1e6)
        _say(f"{backend}: mask, µs", fills, scale=1e6)
        _say(f"{backend}: masks of 5 drafts, µs", chains, scale=1e6)
    return 0


def _vocabulary() -> Vocabulary:
    from plait.platform.demo.embedded import model_path
    from plait.platform.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model_path())
    return Vocabulary.from_tokenizer(
        tokenizer, width=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids
    )


def _spec(number: int) -> GrammarSpec:
    """A schema as tools have them: a few of the usual properties, every third with lengths."""
    kinds: list[dict[str, Any]] = list(COMMON["properties"].values())
    if number % 3 == 0:
        kinds.append({"type": "string", "minLength": 1, "maxLength": 40 + number})
    chosen = [kinds[(number * 7 + i) % len(kinds)] for i in range(4)] + kinds[-1:]
    names = [f"field_{number}_{i}" for i in range(len(chosen))]
    schema = {
        "type": "object",
        "properties": dict(zip(names, chosen, strict=True)),
        "required": names,
        "additionalProperties": False,
    }
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=schema)


def _asked(pool: CompilePool, spec: GrammarSpec) -> float:
    return _timed(lambda: pool.compile_blocking(spec))


def _walk(
    matcher: Matcher, rng: np.random.Generator, fills: list[float], chains: list[float]
) -> None:
    """Up to 60 random tokens; then the last five again, as drafts."""
    row = np.zeros(matcher.vocabulary.num_words, np.int32)
    rows = np.zeros((6, matcher.vocabulary.num_words), np.int32)
    tokens: list[int] = []
    while len(tokens) < 60 and not matcher.finished:
        fills.append(_timed(partial(matcher.fill, row)))
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        tokens.append(int(rng.choice(allowed)))
        matcher.accept(tokens[-1])
    for end in range(5, len(tokens), 5):
        matcher.rollback(matcher.num_tokens)
        for token in tokens[: end - 5]:
            matcher.accept(token)
        drafts = tokens[end - 5 : end]
        chains.append(_timed(partial(matcher.fill_drafts, drafts, rows)))


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _say(what: str, seconds: Sequence[float], *, scale: float = 1e3) -> None:
    values = np.array(seconds) * scale
    if len(values) == 0:
        return
    if len(values) == 1:
        sys.stdout.write(f"{what:40} {values[0]:.2f}\n")
        return
    low, high, most = np.percentile(values, [50, 99, 100])
    sys.stdout.write(
        f"{what:40} p50 {low:.1f}  p99 {high:.1f}  max {most:.1f}  (of {len(values)})\n"
    )


if __name__ == "__main__":
    sys.exit(main())
