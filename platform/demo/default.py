"""What is served where no model is named: SmolLM2 that sees, its adapters and its draft head.

The language model comes from its package (`embedded.py`), what was trained around it from the
folder `parts` beside this file. `assemble.py` makes one checkpoint of language model and vision
tower in the user's cache, once; adapters and draft head are used where they lie. Nothing here is
special beyond that: the same could be said by flags.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from plait.platform.config import Options
from plait.platform.demo.assemble import assemble
from plait.platform.demo.embedded import SERVED_NAME

PARTS = Path(__file__).parent / "parts"

log = logging.getLogger("plait.demo")


def with_default(options: Options) -> Options:
    """`options`, with the default model in the form that is quick where they name no model.

    What they say themselves stands. Raises `ConfigError` where the model cannot be had.
    """
    if options.model is not None:
        return options
    return replace(
        options,
        model=str(assemble(tell=log.info)),
        served_model_name=options.served_model_name or SERVED_NAME,
        quantization="int4" if options.quantization == "auto" else options.quantization,
    )


def with_default_draft(options: Options) -> Options:
    """`options`, with the default model's draft head where they name neither model nor head."""
    head = PARTS / "draft"
    is_wanted = options.model is None and options.draft_model is None
    if not is_wanted or options.speculation == "off" or not (head / "config.json").exists():
        return options
    return replace(options, draft_model=str(head))


def default_adapters(options: Options) -> dict[str, Path]:
    """The default model's adapters by name; none where there is to be no memory for any."""
    if options.adapter_memory_bytes == 0:
        return {}
    return {path.parent.name: path.parent for path in sorted(PARTS.glob("*/adapter_config.json"))}
