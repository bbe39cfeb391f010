"""A picture, an adapter, a JSON schema and drafts in one request, beside plain ones in one batch.

Run `plait serve` first, then: python examples/all_four.py
Prints what each of three pictures shows as an object, how many of its tokens were drafted, and a
plain answer that was computed in the same steps.
"""

import asyncio
import base64
import io
from typing import Literal

from openai import AsyncOpenAI
from PIL import Image, ImageDraw
from pydantic import BaseModel, Field

QUESTION = "Describe the picture as JSON."


class Picture(BaseModel):
    """What the answer is to say."""

    kind: Literal["shapes", "digit", "word"]
    colour: Literal["red", "blue", "green", "yellow", "purple", "orange", "black", "pink"]
    what: str = Field(max_length=9)
    count: int = Field(ge=1, le=5)


def squares(count: int, colour: str) -> str:
    """A picture of so many squares, as a data URL."""
    image = Image.new("RGB", (96, 96), (240, 236, 236))
    for place in range(count):
        x = 3 + 24 * place
        ImageDraw.Draw(image).rectangle((x, 27, x + 18, 45), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def look(client: AsyncOpenAI, count: int, colour: str) -> None:
    content = [
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": squares(count, colour)}},
    ]
    answer = await client.chat.completions.parse(
        model="sight",  # the adapter
        messages=[{"role": "user", "content": content}],
        response_format=Picture,  # the schema; drafts come by themselves
        temperature=0,
        max_tokens=60,
    )
    details = answer.usage.completion_tokens_details.model_dump()
    drafts = details.get("speculation", "none was worth it")
    print(f"{count} {colour}: {answer.choices[0].message.parsed!r} drafts: {drafts}")


async def talk(client: AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three rivers."}],
        temperature=0,
        max_tokens=40,
    )
    print(f"{model}: {answer.choices[0].message.content!r}")


async def main() -> None:
    async with AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none") as client:
        looks = [look(client, *seen) for seen in ((1, "red"), (2, "blue"), (3, "green"))]
        await asyncio.gather(*looks, talk(client))


asyncio.run(main())
