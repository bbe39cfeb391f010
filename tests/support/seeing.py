"""Whole tiny checkpoints that see: weights, tokenizer, processor and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.tiny_processors import SPECS, make_processor_files
from support.tiny_vision import make_vision_model


def make_seeing_checkpoint(family: str, directory: Path) -> Any:
    """Write a whole checkpoint, processor and all; returns transformers' model of it."""
    make_processor_files(family, directory)
    tokens = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    token = next(t["id"] for t in tokens if t["content"] == SPECS[family].embedded)
    model = make_vision_model(family, vocab_size=1600)
    for name in ("image_token_id", "image_token_index"):
        if hasattr(model.config, name):
            setattr(model.config, name, token)
    model.save_pretrained(directory)
    return type(model).from_pretrained(directory, attn_implementation="eager").eval()
