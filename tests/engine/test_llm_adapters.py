"""Adapters of the offline API on a tiny model."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.small_adapters import CONFIG, make_tensors, write_small_adapter

from plait import (
    LLM,
    AdapterError,
    AdapterNotFound,
    BadRequest,
    SamplingParams,
    StructuredOutputs,
)
from plait.platform.offline.adapters import LocalAdapters

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "The quick brown fox"


@pytest.fixture
def llm(checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[LLM]:
    adapters = {f"v{seed}": write_small_adapter(tmp_path / f"v{seed}", seed) for seed in (1, 2)}
    path = str(checkpoint("llama"))
    with LLM(path, adapters=adapters, kv_cache_bytes=8 << 20, num_threads=1) as made:
        yield made


def answer(llm: LLM, adapter: Any = None, prompt: str = PROMPT) -> list[int]:
    (output,) = llm.generate(prompt, GREEDY, adapter=adapter)
    return output.outputs[0].token_ids


def test_each_prompt_has_its_own_adapter_in_one_batch(llm: LLM) -> None:
    choices = [None, "v1", "v2", [("v1", 0.5), ("v2", 0.5)], [("v1", 1)], [("v2", 0)]]
    alone = [answer(llm, choice) for choice in choices]
    together = llm.generate([PROMPT] * len(choices), GREEDY, adapter=choices)
    assert [output.outputs[0].token_ids for output in together] == alone
    assert alone[1] == alone[4]
    assert alone[0] == alone[5]
    assert len({tuple(tokens) for tokens in alone}) == 4
    loaded = llm.list_adapters()
    assert [len(output.adapter_generations) for output in together] == [0, 1, 1, 2, 1, 0]
    assert together[1].adapter_generations == (loaded["v1"].generation,)


def test_pushed_tensors_are_what_their_files_are_and_the_loaded_is_told(llm: LLM) -> None:
    info = llm.load_adapter("pushed", tensors=make_tensors(1), config=CONFIG)
    assert {site.rank for site in info.report.sites} == {4}
    assert info.report.changes_kv
    assert answer(llm, "pushed") == answer(llm, "v1")


def test_a_replaced_adapter_serves_the_next_answer_and_not_the_one_that_runs(llm: LLM) -> None:
    old, new = answer(llm, "v1"), answer(llm, "v2")
    first = llm.load_adapter("live", tensors=make_tensors(1), config=CONFIG)
    stream = llm.stream(PROMPT, GREEDY, adapter="live")
    tokens = list(next(stream).token_ids)
    with pytest.raises(AdapterError, match="not of the expected one"):
        llm.load_adapter(
            "live",
            tensors=make_tensors(3),
            config=CONFIG,
            replace=True,
            expected_generation="0" * 64,
        )
    llm.load_adapter(
        "live",
        tensors=make_tensors(2),
        config=CONFIG,
        replace=True,
        expected_generation=first.generation,
    )
    assert answer(llm, "live") == new
    llm.unload_adapter("v1")
    for delta in stream:
        tokens += delta.token_ids
    assert tokens == old
    llm.unload_adapter("live")
    assert list(llm.list_adapters()) == ["v2"]
    assert list(llm._adapters._store._holds) == [llm.list_adapters()["v2"].generation]


def test_what_is_not_loaded_is_no_base_answer(llm: LLM) -> None:
    with pytest.raises(AdapterNotFound, match="prompt 1: no adapter 'v3' is loaded"):
        llm.generate([PROMPT, PROMPT], GREEDY, adapter=["v1", "v3"])
    llm.unload_adapter("v1")
    with pytest.raises(AdapterNotFound):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, adapter="v1")


@pytest.mark.parametrize("adapter", [5, {"v1": 1.0}, [5], [("v1", 1.0), "v2"], [("v1", True)]])
def test_what_is_no_choice_is_refused(llm: LLM, adapter: Any) -> None:
    with pytest.raises(BadRequest):
        llm.generate(PROMPT, GREEDY, adapter=adapter)


@pytest.mark.parametrize("adapter", [[("v1", "0.5")], [("v1", 1.0), ("v1", "0.5")]])
@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_scale_that_is_no_number_is_told_as_that(
    llm: LLM, adapter: Any, num_prompts: int
) -> None:
    each = adapter if num_prompts == 1 else [None, adapter]
    with pytest.raises(BadRequest, match=r"'v1': scale must be a number .*, not '0.5'"):
        llm.generate([PROMPT] * num_prompts, GREEDY, adapter=each)


def test_an_adapter_that_does_not_fit_leaves_nothing(llm: LLM) -> None:
    tensors = make_tensors(1)
    tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = tensors.popitem()[1]
    with pytest.raises(AdapterError) as refused:
        llm.load_adapter("broken", tensors=tensors, config=CONFIG)
    assert refused.value.report is not None
    assert sorted(llm.list_adapters()) == ["v1", "v2"]
    assert len(llm._adapters._store._holds) == 2


def test_a_bundle_brings_its_template_and_its_defaults(llm: LLM, tmp_path: Path) -> None:
    bundle = {
        "chat_template": "{% for m in messages %}<{{ m.content }}>{% endfor %}",
        "sampling": {"temperature": 0, "max_tokens": 3},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "sign", "schema": {"enum": [1, 2]}},
        },
    }
    directory = write_small_adapter(tmp_path / "bundled", 1)
    (directory / "plait_adapter.json").write_text(json.dumps(bundle))
    llm.load_adapter("bundled", directory)
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], adapter="bundled")
    assert output.prompt == "<Hi>"
    assert output.outputs[0].text in ("1", "2")
    (output,) = llm.generate("Hi", adapter="bundled")
    assert output.outputs[0].text in ("1", "2")
    asked = StructuredOutputs(regex="a{9}")
    (output,) = llm.generate("Hi", adapter="bundled", structured_outputs=asked)
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text == "aaa"


def test_copies_are_deleted_with_their_owner_when_nobody_closes_it(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    adapters = LocalAdapters(llm._engine, llm.tokenizer, llm._running)
    adapters._stored(None, make_tensors(1), CONFIG)
    (root,) = tmp_path.glob("plait-adapters-*")
    assert list(root.iterdir())
    del adapters
    gc.collect()
    assert not root.exists()
