"""A tool call from a server and its result sent back, with the openai package.

Run `plait serve` first, then: python examples/tools_client.py
Prints the call, then what the model makes of the result.
"""

import json

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
answer = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
    temperature=0,
)
message = answer.choices[0].message
(call,) = message.tool_calls
print(call.function.name, json.loads(call.function.arguments))

result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, light rain"}
answer = client.chat.completions.create(
    model=model,
    messages=[*messages, message.model_dump(exclude_none=True), result],
    temperature=0,
    max_tokens=40,
)
print(answer.choices[0].message.content)
