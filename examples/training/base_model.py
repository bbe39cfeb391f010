"""The embedded model as transformers trains it, in fp32, and its chat format."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plait.platform.demo.embedded import model_path

PARTS = Path(__file__).parents[2] / "platform" / "demo" / "parts"  # where what is trained goes


def load() -> tuple[Any, Any]:
    """The model, dequantised, and its tokenizer."""
    file = model_path()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    return model.train(), tokenizer


def chat_ids(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], int]:
    """Ids of a chat of one question and its answer, and how many of them are before the answer."""
    asked = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    before = tokenizer(text, add_special_tokens=False).input_ids
    said = tokenizer(answer + "<|im_end|>", add_special_tokens=False).input_ids
    return before + said, len(before)
