"""Measure requests that use all of it: a picture, an adapter, a JSON schema and drafts in each.

Run `plait serve` first, then: python examples/training/evaluate_together.py [--count 100]
Asks about fresh pictures, eight at a time, and prints how many answers are right in all fields, how
many are valid JSON of the schema, and how the drafts fared.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import httpx
from PIL import Image
from renders import draw_scene
from tasks.sight import DESCRIBE, SCHEMA, facts

SEED = 20270
CONCURRENCY = 8


@dataclass(slots=True)
class Together:
    """What came of the requests."""

    count: int = 0
    right: int = 0
    valid: int = 0
    drafted: int = 0
    accepted: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.right} of {self.count} right in all fields, {self.valid} valid, "
            f"{self.accepted} of {self.drafted} drafts accepted"
        )


async def measure(url: str, count: int, seed: int = SEED) -> Together:
    """Ask the server at `url` about so many fresh pictures."""
    rng, found, turns = random.Random(seed), Together(), asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def ask(image: Image.Image, wanted: dict[str, Any]) -> None:
            async with turns:
                reply = await client.post("/v1/chat/completions", json=_body(image))
            _count(found, reply.raise_for_status().json(), wanted)

        drawn = [draw_scene(rng) for _ in range(count)]
        await asyncio.gather(*(ask(one.image, facts(one.scene)) for one in drawn))
    return found


def _body(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": DESCRIBE},
    ]
    return {
        "model": "sight",
        "messages": [{"role": "user", "content": content}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "picture", "schema": SCHEMA},
        },
        "temperature": 0,
        "max_tokens": 64,
    }


def _count(found: Together, answer: dict[str, Any], wanted: dict[str, Any]) -> None:
    text = answer["choices"][0]["message"]["content"]
    found.count += 1
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    found.valid += isinstance(said, dict) and set(said) == set(SCHEMA["properties"])
    found.right += said == wanted
    if said != wanted:
        found.wrong.append(f"{wanted} -> {text}")
    details = answer["usage"].get("completion_tokens_details") or {}
    drafts = details.get("speculation") or {}
    found.drafted += drafts.get("drafted_tokens", 0)
    found.accepted += drafts.get("accepted_tokens", 0)


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    found = asyncio.run(measure(options.url, options.count))
    for line in (*found.wrong, str(found)):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
