"""Compiling a schema as a server would, for `plait schema check`: the same limits and words."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.platform.errors import ConfigError, PlaitError

if TYPE_CHECKING:
    from plait.structured.spec import GrammarSpec


def compiled(spec: GrammarSpec, source: str | None) -> dict[str, Any]:
    """What compiling gave: seconds and bytes, or the server's refusal as `error`.

    `source` is a model's directory or id, whose tokens count; None: the embedded one's.
    """
    from plait.structured.pool import CompilePool, PoolSettings
    from plait.structured.spec import GrammarKind, GrammarSpec

    pool = CompilePool(_vocabulary(source), PoolSettings(has_spare=False))
    try:
        pool.compile_blocking(GrammarSpec(kind=GrammarKind.JSON_OBJECT))  # the compiler starts
        began = time.perf_counter()
        grammar = pool.compile_blocking(spec)
    except PlaitError as error:
        return {"error": error.message}
    finally:
        pool.close()
    seconds = time.perf_counter() - began
    return {"error": None, "seconds": round(seconds, 6), "bytes": grammar.num_bytes}


def _vocabulary(source: str | None) -> Any:
    from plait.platform.cli.serve import tokenizer_source
    from plait.platform.config import Options
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.vocabulary import Vocabulary

    found: str | Path = tokenizer_source(Options(model=source)) or str(source)
    tokenizer = Tokenizer.load(found)
    if not tokenizer.eos_token_ids:
        raise ConfigError(
            f"{source} has no end token, so no answer of it can be held to a schema", param="model"
        )
    return Vocabulary.from_tokenizer(
        tokenizer, width=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids
    )
