"""The offline API on a tiny model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait import (
    LLM,
    BadRequest,
    ConfigError,
    ContextLengthExceeded,
    FinishReason,
    InvalidParameter,
    SamplingParams,
    Unsupported,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KV = 8 << 20


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(checkpoint("llama")), kv_cache_bytes=KV, num_threads=1) as made:
        yield made


def test_outputs_carry_text_ids_logprobs_and_reasons(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    (output,) = llm.generate("The quick brown fox", params)
    answer = output.outputs[0]
    assert output.prompt == "The quick brown fox"
    assert output.prompt_token_ids == llm.tokenizer.encode("The quick brown fox")
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    assert all(len(entry.top) == 3 and entry.rank == 1 for entry in answer.logprobs)
    assert answer.cumulative_logprob == pytest.approx(sum(e.logprob for e in answer.logprobs))
    assert output.prompt_logprobs is not None
    assert [e.token_id for e in output.prompt_logprobs] == output.prompt_token_ids[1:]


def test_text_token_ids_and_mappings_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello world")
    texts = [
        llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
        for prompt in ("Hello world", ids, {"prompt_token_ids": ids}, {"prompt": "Hello world"})
    ]
    assert all(text == texts[0] for text in texts)


def test_a_second_prompt_like_the_first_is_found_in_the_cache(llm: LLM) -> None:
    prompt = [7, 8, 9] * 20
    first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 48
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_streams_equal_the_batch_and_may_be_woven(llm: LLM) -> None:
    prompts = ["One two", "The sea"]
    whole = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    texts = ["", ""]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    for pair in itertools.zip_longest(*streams):
        for i, delta in enumerate(pair):
            texts[i] += "" if delta is None else delta.text
    assert texts == whole


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream("One two", GREEDY):
        break
    llm.generate("x", GREEDY)
    assert llm._engine.stats.kv_usage == 0
    assert llm._engine.stats.num_running == 0


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(d.text for d in llm.stream_chat(messages, GREEDY)) == output.outputs[0].text
    two = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].text for o in two] == [output.outputs[0].text] * 2


def test_more_prompts_than_the_queue_holds(checkpoint: Callable[[str], Path]) -> None:
    path = str(checkpoint("llama"))
    with LLM(path, max_num_seqs=2, max_num_queued_reqs=1, kv_cache_bytes=KV) as small:
        outputs = small.generate([[5 + i, 6] for i in range(20)], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [[5 + i, 6] for i in range(20)]
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)


def test_a_bad_prompt_is_named_before_anything_runs(llm: LLM) -> None:
    steps = llm._engine.stats.num_steps
    with pytest.raises(ContextLengthExceeded, match=r"prompt 1: .*600.*512"):
        llm.generate([[5], [5] * 600], GREEDY)
    with pytest.raises(BadRequest, match="token id 100000"):
        llm.generate([[100_000]], GREEDY)
    with pytest.raises(BadRequest, match="empty"):
        llm.generate([[]], GREEDY)
    with pytest.raises(BadRequest, match="token ids"):
        llm.generate([[1.5]], GREEDY)  # type: ignore[list-item]
    with pytest.raises(BadRequest, match="2 sampling parameters for 1"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(InvalidParameter, match="temperature"):
        SamplingParams(temperature=float("nan"))
    assert llm._engine.stats.num_steps == steps


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM("nowhere", max_model_length=5)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_prompts_come_in_any_shape_that_is_clear(llm: LLM) -> None:
    ids = [5, 6, 7]
    wanted = llm.generate([ids], GREEDY)[0].outputs[0].token_ids
    shapes: list[Any] = [
        np.array(ids),
        np.array([ids]),
        [np.array(ids)],
        tuple(ids),
        torch.tensor(ids),
    ]
    shapes += [{"prompt_token_ids": np.array(ids)}, (p for p in [ids]), [{"prompt_token_ids": ids}]]
    for shape in shapes:
        assert llm.generate(shape, GREEDY)[0].outputs[0].token_ids == wanted
    texts = llm.generate(["a", "b"], (p for p in (GREEDY, GREEDY)))  # type: ignore[arg-type]
    assert len(texts) == 2


@pytest.mark.parametrize(
    "prompts",
    [None, 5, 1.5, b"abc", [None], [b"abc"], [True], [1.5], ["a", 5], [[1, "a"]], {},
     {"prompt": 5}, {"prompt_token_ids": "ab"}, {"prompt_token_ids": [1.5]},
     {"prompt_token_ids": 5}, np.array([1.5])],
    ids=str,
)  # fmt: skip
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(BadRequest, match="prompt"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [[], [None], 5, {"max_tokens": 2}, "x"], ids=str)
def test_what_are_no_params_are_refused_by_name(llm: LLM, params: Any) -> None:
    with pytest.raises(BadRequest, match="param"):
        llm.generate("a", params)


@pytest.mark.parametrize("speculation", [False, "off", {"enabled": False}, [None]], ids=str)
def test_what_is_no_speculation_is_refused_by_name(llm: LLM, speculation: Any) -> None:
    steps = llm._engine.stats.num_steps
    with pytest.raises(BadRequest, match=r"Speculation\(enabled=False\)"):
        llm.generate("a", GREEDY, speculation=speculation)
    assert llm._engine.stats.num_steps == steps


@pytest.mark.parametrize(
    "messages",
    [None, "hi", {"role": "user", "content": "x"}, [[5]], [["hi"]], [{"content": "x"}],
     [{"role": 5, "content": "x"}], [{"role": "user"}], [{"role": "user", "content": None}]],
    ids=str,
)  # fmt: skip
def test_what_is_no_conversation_is_refused_by_name(llm: LLM, messages: Any) -> None:
    with pytest.raises(BadRequest, match="messages"):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize(
    "fields",
    [{"seed": "a"}, {"seed": 1.5}, {"n": 2.0}, {"n": True}, {"top_k": 1.5}, {"min_tokens": 1.5},
     {"max_tokens": True}, {"logprobs": True}, {"stop": 5}, {"stop": [5]}, {"stop": ""},
     {"stop_token_ids": ["a"]}, {"stop_token_ids": [1.5]}, {"stop_token_ids": 5},
     {"stop_token_ids": [True]}, {"allowed_token_ids": [1.5]}, {"allowed_token_ids": 5},
     {"allowed_token_ids": []}, {"logit_bias": {5: "a"}}, {"logit_bias": [1]},
     {"logit_bias": {True: 1}}, {"logit_bias": {5: 101}}, {"bad_words": 5}, {"bad_words": [5]},
     {"ignore_eos": "yes"}, {"skip_special_tokens": 0}, {"temperature": "1"}],
    ids=str,
)  # fmt: skip
def test_parameters_of_a_wrong_type_are_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidParameter, match=name) as caught:
        SamplingParams(**fields)
    assert caught.value.param == name


def test_numpy_numbers_and_a_single_string_are_taken_for_what_they_are() -> None:
    params = SamplingParams(
        n=np.int64(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        logit_bias={np.int64(5): np.float32(1)},  # type: ignore[dict-item]
        stop="ab",
        bad_words="cd",
    )
    assert (params.n, params.temperature, params.stop_token_ids) == (2, 0.5, (1, 2))
    assert (params.logit_bias, params.stop, params.bad_words) == ({5: 1.0}, ("ab",), ("cd",))
    assert type(params.n) is int


@pytest.mark.parametrize(
    "options",
    [{"num_threads": 0}, {"num_threads": "2"}, {"kv_cache_bytes": "8MB"}, {"max_model_len": "9"},
     {"max_num_seqs": True}, {"block_size": 1.5}, {"seed": "x"}, {"memory_utilization": "x"},
     {"dtype": 32}, {"enable_prefix_caching": 1}, {"model": 5}],
    ids=str,
)  # fmt: skip
def test_options_of_a_wrong_type_are_refused_by_name(
    checkpoint: Callable[[str], Path], options: dict[str, Any]
) -> None:
    (name,) = options
    with pytest.raises(ConfigError) as caught:
        LLM(**{"model": str(checkpoint("llama")), **options})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "image", "image": b"\x89PNG"}, "takes no images"),
        ({"type": "image_url", "image_url": {"url": "data:,x"}}, "takes no images"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio is not served"),
    ],
)
def test_what_a_model_cannot_see_is_refused_rather_than_dropped(llm: LLM, part, match) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    for ask in (llm.chat, llm.encode_chat, lambda m: list(llm.stream_chat(m))):
        with pytest.raises(Unsupported, match=match) as error:
            ask(messages)
        assert error.value.param == "messages[0].content[1]"
