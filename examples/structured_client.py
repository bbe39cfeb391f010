"""Answers of a given form from a server, with the openai package and pydantic.

Run `plait serve` first, then: python examples/structured_client.py
Prints a parsed object, then one of two words.
"""

from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """What the model is to fill in."""

    name: str = Field(max_length=30)
    country: str = Field(max_length=30)
    size: Literal["small", "large"]


client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Describe the city of Paris."}],
    response_format=City,
    temperature=0,
    max_tokens=200,
)
print(answer.choices[0].message.parsed)

# What OpenAI's API has no word for goes into extra_body.
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Is snow hot or cold?"}],
    extra_body={"structured_outputs": {"choice": ["hot", "cold"]}},
    temperature=0,
)
print(answer.choices[0].message.content)
