"""Tokens that training added, from PEFT's and transformers' own files to text, on a tiny model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peft_adapters import load_peft, make_adapter, quiet
from support.tiny_models import VOCAB_SIZE
from tokenizers import AddedToken
from transformers import AutoTokenizer

from plait import LLM, SamplingParams

NEW = [f"<new_{i}>" for i in range(8)]
CASES: dict[str, dict[str, Any]] = {
    # In rows that the model has beyond its tokenizer, and beyond those.
    "rows": {"trainable_token_indices": [300, 301, *range(VOCAB_SIZE, VOCAB_SIZE + 3)]},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(params=CASES)
def adapter(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path: Path
) -> tuple[Path, Any, int]:
    """The folder, transformers' tokenizer, and how many tokens the vocabulary grew by."""
    base = checkpoint("llama")
    tokenizer = AutoTokenizer.from_pretrained(base)
    first = len(tokenizer)
    tokens = [*NEW[:4], AddedToken("spaced out", normalized=False)]
    while first + len(tokens) < VOCAB_SIZE:
        tokens.append(f"<filler_{len(tokens)}>")
    tokenizer.add_tokens(tokens)
    tokenizer.add_special_tokens({"additional_special_tokens": NEW[4:7]})
    grown = len(tokenizer) - VOCAB_SIZE
    assert grown == 3
    folder = make_adapter(
        base,
        tmp_path / "adapter",
        r=4,
        target_modules=["q_proj"],
        num_new_tokens=grown,
        strength=1.5,
        **CASES[request.param],
    )
    tokenizer.save_pretrained(folder)
    return folder, tokenizer, grown


@pytest.fixture
def llm(checkpoint: Callable[[str], Path], adapter: tuple[Path, Any, int]) -> Iterator[LLM]:
    path = str(checkpoint("llama"))
    with LLM(path, dtype="float32", kv_cache_bytes=8 << 20, num_threads=1) as made:
        made.load_adapter("new", adapter[0])
        yield made


@torch.no_grad()
def test_prompts_and_answers_are_those_of_peft_and_transformers(
    llm: LLM, adapter: tuple[Path, Any, int], checkpoint: Callable[[str], Path]
) -> None:
    folder, tokenizer, grown = adapter
    prompts = ["<new_0>fox<new_5> spaced out", "The <new_4><new_6>dog", "<new_1>"]
    outputs = llm.generate(prompts, GREEDY, adapter="new")
    peft = load_peft(checkpoint("llama"), folder, num_new_tokens=grown)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer.encode(prompt)
        assert output.prompt_token_ids == ids
        with quiet():
            whole = peft.generate(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=24,
                eos_token_id=-1,
                pad_token_id=0,
            )[0].tolist()
        (answer,) = output.outputs
        assert answer.token_ids == whole[len(ids) :]
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert outputs[0].prompt_token_ids != llm.generate(prompts[0], GREEDY)[0].prompt_token_ids


def test_forced_tokens_have_their_text_and_stop_strings_see_it(
    llm: LLM, adapter: tuple[Path, Any, int]
) -> None:
    ids = adapter[1].convert_tokens_to_ids([NEW[0], NEW[5]])
    for token_id, text in zip(ids, (NEW[0], NEW[5]), strict=True):
        params = dataclasses.replace(
            GREEDY, max_tokens=3, allowed_token_ids=(token_id,), skip_special_tokens=False
        )
        shown = llm.generate("x", params, adapter="new")[0].outputs[0]
        assert shown.text == text * 3
        stopped = llm.generate(
            "x", dataclasses.replace(params, stop=(text[1:] + "<",)), adapter="new"
        )[0].outputs[0]
        assert (stopped.text, stopped.finish_reason) == ("<", "stop")
        hidden = llm.generate(
            "x", dataclasses.replace(params, skip_special_tokens=True), adapter="new"
        )[0].outputs[0]
        assert hidden.text == ("" if text == NEW[5] else text * 3)
