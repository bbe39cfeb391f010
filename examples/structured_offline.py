"""Answers of a given form in this process, without a server.

Run: python examples/structured_offline.py [MODEL]
Prints a JSON object, a choice and a text that fits a regular expression.
"""

import json
import sys

from plait import LLM, SamplingParams, StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    params = SamplingParams(temperature=0, max_tokens=64)
    prompts = ["A made-up person:", "Is the sky blue or green? It is", "Today's date is"]
    constraints = [
        StructuredOutputs(json=PERSON),
        StructuredOutputs(choice=["blue", "green"]),
        StructuredOutputs(regex=r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])"),
    ]
    outputs = llm.generate(prompts, params, structured_outputs=constraints)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(prompt, output.outputs[0].text)
    assert json.loads(outputs[0].outputs[0].text).keys() == {"name", "age"}
