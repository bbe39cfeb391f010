"""Draft models of real families: loaded, checked and fitted; and what they draft is right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.draft_engine import DraftEngine, options
from support.drafting import (
    FREE_ROWS,
    EagerEconomy,
    FixedCost,
    accepted,
    draft_whatever_it_costs,
    set_economy,
    verified,
)
from support.tiny_models import make_checkpoint

from plait import LLM, SamplingParams, StructuredOutputs
from plait.platform.errors import ConfigError
from plait.platform.start import start_engine

Checkpoint = Callable[[str], Path]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"enum": [1, "x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_a_draft_model_that_equals_the_target_is_always_right(
    checkpoint: Checkpoint, family: str
) -> None:
    path = checkpoint(family)
    engine = DraftEngine(options(path, path))
    assert engine.run() == DraftEngine(options(path)).run()
    assert engine.source.figures["faults"] == 0
    assert engine.num_held == engine.num_drafts > 100


def test_another_family_with_windows_drafts_too(checkpoint: Checkpoint) -> None:
    """Mistral's layers all have a window here, and keep all tokens none the less."""
    engine = DraftEngine(options(checkpoint("llama"), checkpoint("mistral")))
    assert engine.run() == DraftEngine(options(checkpoint("llama"))).run()
    assert engine.source.figures["faults"] == 0
    assert engine.num_drafts > 100


def test_under_a_grammar_the_draft_model_is_masked_as_the_target_is(
    checkpoint: Checkpoint,
) -> None:
    path = str(checkpoint("llama"))
    constraints = [
        StructuredOutputs(json=SCHEMA),
        None,
        StructuredOutputs(regex="[ab]{20,30}!"),
        StructuredOutputs(grammar='root ::= "a" | "b" root'),
    ]
    params = SamplingParams(temperature=1.2, seed=1, max_tokens=120)
    shared: dict[str, Any] = {"kv_cache_bytes": 32 << 20, "num_threads": 1}

    def texts(llm: LLM) -> list[str]:
        outputs = llm.generate(["Go: "] * 4, params, structured_outputs=constraints)
        return [output.outputs[0].text for output in outputs]

    with (
        LLM(path, speculation="off", **shared) as plain,
        LLM(path, draft_model=path, **shared) as drafting,
    ):
        drafter = draft_whatever_it_costs(drafting._engine)
        set_economy(drafter, EagerEconomy(FixedCost(FREE_ROWS)))
        drafter._candidates._texts = ()
        drafter._candidates._constraints.forced = lambda *_: []
        assert texts(drafting) == texts(plain)
        stats = drafting._engine.stats
        # An end token may be drafted behind what completes an answer.
        assert verified(stats, "model") - accepted(stats, "model") <= 3
        assert accepted(stats, "model") > 100
        assert drafter._model._source.figures["faults"] == 0
        drafter._model._source.check_integrity([])


def test_a_target_of_windows_alone_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="sliding windows") as refusal:
        DraftEngine(options(checkpoint("mistral"), checkpoint("llama")))
    assert refusal.value.param == "draft_model"


def test_another_tokenizer_is_refused_with_an_example(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    other = shutil.copytree(checkpoint("llama"), tmp_path / "other")
    spec = json.loads((other / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    names = {token_id: token for token, token_id in vocab.items()}
    vocab[names[70]], vocab[names[71]] = 71, 70
    (other / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=r"other has another tokenizer.* token 70 is '.' there"):
        DraftEngine(options(checkpoint("llama"), other))


def test_a_vocabulary_that_ends_earlier_drafts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    trimmed = make_checkpoint("llama", tmp_path / "trimmed", vocab_size=250)
    engine = DraftEngine(options(checkpoint("llama"), trimmed))
    assert engine.run() == DraftEngine(options(checkpoint("llama"))).run()
    assert engine.source.figures["faults"] == 0
    assert engine.num_drafts > 100


def test_what_cannot_be_loaded_is_refused_by_the_name_of_the_flag(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="--draft: there is no file or directory") as refusal:
        DraftEngine(options(checkpoint("llama"), Path("no/such/model")))
    assert refusal.value.param == "draft_model"
    nothing = replace(options(Path("not looked at")), draft_model="")
    with pytest.raises(ConfigError, match="--draft wants a directory or hub id") as refusal:
        start_engine(nothing)
    assert refusal.value.param == "draft_model"


def test_a_start_names_the_draft_model_and_counts_its_memory(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    short = make_checkpoint("llama", tmp_path / "short", max_position_embeddings=128)
    started = start_engine(options(checkpoint("llama"), short))
    notes = started.engine.config.model.notes
    assert "draft: short, 131,904 parameters, float32" in notes
    assert any("its own context of 128 tokens" in note for note in notes)
    assert "load draft model" in started.phases
    assert any(
        "draft model: weights 515.25KiB" in str(line) for line in started.facts["arithmetic"]
    )


def test_the_pages_of_both_models_fit_the_one_budget(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    alone, both = DraftEngine(options(path)), DraftEngine(options(path, path))
    assert both.fit.kv_bytes <= 4 << 20
    num_tokens = alone.fit.cache.num_tokens
    assert both.fit.cache.num_tokens == pytest.approx(num_tokens / 2, rel=0.05)
    pages = [pages.nbytes for pages in both.draft.executor.pages]
    target = sum(g.num_blocks * g.bytes_per_block(4, 4) for g in both.fit.cache.groups)
    assert sum(pages) + target == both.fit.kv_bytes
