"""Answers of a given form from a server, with the openai package and pydantic.

Run `plait serve` first, then: python examples/structured_client.py
Prints a parsed object, then one of two words.
"""

from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Message(BaseModel):
    """What the model is to fill in; it cannot write anything else."""

    name: str | None = Field(max_length=40)
    order: str | None = Field(max_length=12)
    product: str = Field(max_length=30)
    problem: Literal["late", "damaged", "wrong item", "missing part", "billing"]
    wish: Literal["refund", "replacement", "information"]


TEXT = (
    "Extract the fields of this message as JSON.\n\n"
    "Hello, the fish tank came scratched all over. My order is A-40213. I would like a refund. "
    "Best, Noah Bennett"
)

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.chat.completions.parse(
    model="fields",  # an adapter that knows what to fill in; the base would hold the form as well
    messages=[{"role": "user", "content": TEXT}],
    response_format=Message,
    temperature=0,
    max_tokens=200,
)
print(answer.choices[0].message.parsed)

# What OpenAI's API has no word for goes into extra_body.
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Is snow hot or cold?"}],
    extra_body={"structured_outputs": {"choice": ["hot", "cold"]}},
    temperature=0,
)
print(answer.choices[0].message.content)
