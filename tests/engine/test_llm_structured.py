"""Constraints and tools of the offline `LLM`, on a tiny random model."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from support.tiny_models import make_checkpoint

from plait import LLM, BadRequest, SamplingParams, StructuredOutputs
from plait.platform.core import Event, FinishReason
from plait.platform.errors import GrammarTooComplex, InvalidRegex

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"enum": [1, "x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CHAT = [{"role": "user", "content": "Hi"}]
HOT = SamplingParams(temperature=1.5, seed=1, max_tokens=120)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llm"), max_position_embeddings=2048)
    with LLM(folder, kv_cache_bytes=32 << 20, num_threads=1) as made:
        yield made


def text_of(output):
    assert output.outputs[0].finish_reason == "stop"
    return output.outputs[0].text


def test_each_prompt_obeys_its_own_constraint_and_free_ones_are_as_alone(llm):
    constraints = [
        StructuredOutputs(json=SCHEMA),
        None,
        StructuredOutputs(regex="[ab]{2,5}!"),
        StructuredOutputs(choice=["yes", "no"]),
        StructuredOutputs(grammar='root ::= "a" | "b" root'),
    ]
    free = SamplingParams(temperature=0, max_tokens=12)
    params = [HOT, free, HOT, HOT, HOT]
    outputs = llm.generate(["Go: "] * 5, params, structured_outputs=constraints)
    jsonschema.validate(json.loads(text_of(outputs[0])), SCHEMA)
    assert outputs[1].outputs[0].text == llm.generate("Go: ", free)[0].outputs[0].text
    assert re.fullmatch("[ab]{2,5}!", text_of(outputs[2]))
    assert text_of(outputs[3]) in ("yes", "no")
    assert re.fullmatch("b*a", text_of(outputs[4]))


def test_pydantic_models_and_json_text_are_schemas(llm):
    import pydantic

    class Small(pydantic.BaseModel):
        size: int = pydantic.Field(ge=0, le=9)

    for schema in (Small, Small.model_json_schema(), json.dumps(Small.model_json_schema())):
        (output,) = llm.generate("x", HOT, structured_outputs=StructuredOutputs(json=schema))
        Small.model_validate_json(text_of(output))


def test_streams_join_to_the_whole_answer(llm):
    constraint = StructuredOutputs(json=SCHEMA)
    whole = llm.generate("x", HOT, structured_outputs=constraint)[0].outputs[0].text
    assert "".join(d.text for d in llm.stream("x", HOT, structured_outputs=constraint)) == whole


def test_chats_give_parsed_calls(llm):
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (output,) = llm.chat(CHAT, HOT, **options)
    answer = output.outputs[0]
    (call,) = answer.tool_calls
    assert (call.name, answer.content) == ("f", "")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    back = {"id": call.id, "function": {"name": "f", "arguments": call.arguments}}
    history = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [back]},
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    assert llm.chat(history, HOT)[0].outputs[0].tool_calls == []


def test_what_cannot_be_held_names_the_prompt(llm):
    bad = StructuredOutputs(regex=r"(a)\1")
    with pytest.raises(InvalidRegex, match=r"prompt 1: .*reference"):
        llm.generate(["a", "b"], HOT, structured_outputs=[None, bad])


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutputs(),
        StructuredOutputs(json={}, regex="a"),
        StructuredOutputs(json_object=False),
    ],
)
def test_none_or_several_constraints_in_one_are_refused(constraint):
    with pytest.raises(BadRequest):
        constraint.spec()


def test_constraints_of_a_wrong_shape_are_refused(llm):
    for wrong in ({"json": {}}, "regex", [StructuredOutputs(regex="a")] * 2):
        with pytest.raises(BadRequest, match="structured_outputs"):
            llm.generate("a", structured_outputs=wrong)


def test_a_grammar_that_turns_out_too_dear_names_its_field(llm, monkeypatch):
    fault = ("grammar_too_complex", "slow")

    def step(self):
        (request_id,) = llm._running._jobs
        llm._running._engine.abort(request_id)
        return [
            Event(request_id=request_id, index=0, finish_reason=FinishReason.ERROR, error=fault)
        ]

    monkeypatch.setattr(type(llm._running._engine), "step", step)
    with pytest.raises(GrammarTooComplex, match="slow") as caught:
        list(llm.stream("x", HOT, structured_outputs=StructuredOutputs(regex="[ab]")))
    assert caught.value.param == "structured_outputs.regex"
