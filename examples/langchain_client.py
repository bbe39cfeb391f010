"""Adapters and forms in LangChain, by its OpenAI integration.

Run `plait serve` first, then: python examples/langchain_client.py   (needs langchain-openai)
Prints a polite sentence as it is streamed, SQL for two questions at once, and a parsed object.
"""

from typing import Literal

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Complaint(BaseModel):
    """What a message says."""

    name: str | None = Field(max_length=40)
    order: str | None = Field(max_length=12)
    product: str = Field(max_length=30)
    problem: Literal["late", "damaged", "wrong item", "missing part", "billing"]
    wish: Literal["refund", "replacement", "information"]


def model(name: str) -> ChatOpenAI:
    """An adapter of the server, or its base."""
    return ChatOpenAI(
        model=name,
        base_url="http://127.0.0.1:8000/v1",
        api_key="none",
        temperature=0,
        max_tokens=60,
    )


rewrite = ChatPromptTemplate.from_template("Rewrite this politely: {text}") | model("tone")
for chunk in rewrite.stream({"text": "the printer is broken AGAIN"}):
    print(chunk.content, end="", flush=True)
print()

query = ChatPromptTemplate.from_template(
    "Write the SQL query that answers the question.\n\n"
    "Table: ships(name, harbour, tonnage, speed)\nQuestion: {question}"
) | model("sql")
for answer in query.batch(
    [
        {"question": "Which ships have a speed of more than 30?"},
        {"question": "Give the name of the 3 ships with the highest tonnage."},
    ]
):
    print(answer.content)

extract = model("fields").with_structured_output(Complaint, method="json_schema")
message = "I was charged twice for the umbrella. Ref. 99120. Could you explain this?"
print(extract.invoke(f"Extract the fields of this message as JSON.\n\n{message}"))
