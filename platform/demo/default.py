"""What is served where no model is named: SmolLM2 that sees, its adapters and its draft model.

The language model comes from its package (`embedded.py`), what was trained around it from the
folder `parts` beside this file. `assemble.py` makes one checkpoint of language model and vision
tower in the user's cache, once; adapters and draft model are used where they lie. Nothing here is
special beyond that: the same could be said by flags.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plait.platform.config import Options
from plait.platform.demo.assemble import assemble
from plait.platform.demo.embedded import SERVED_NAME

PARTS = Path(__file__).parent / "parts"

log = logging.getLogger("plait.demo")


def with_default(
    options: Options, *, has_draft: bool = True, tell: Callable[[str], None] = log.info
) -> Options:
    """`options`, with the default model and what makes it quick where they name no model.

    What they say themselves stands. Without `has_draft` there is no draft model; `tell` hears of
    what takes long. Raises `ConfigError` where the model cannot be had.
    """
    if options.model is not None:
        return options
    draft = PARTS / "draft"
    drafts = has_draft and options.speculation != "off" and (draft / "config.json").exists()
    return replace(
        options,
        model=str(assemble(tell=tell)),
        served_model_name=options.served_model_name or SERVED_NAME,
        quantization="int4" if options.quantization == "auto" else options.quantization,
        draft_model=str(draft) if drafts and options.draft_model is None else options.draft_model,
    )


def default_adapters(options: Options) -> dict[str, Path]:
    """The default model's adapters by name; none where there is to be no memory for any."""
    if options.adapter_memory_bytes == 0:
        return {}
    return {path.parent.name: path.parent for path in sorted(PARTS.glob("*/adapter_config.json"))}
