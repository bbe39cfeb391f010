"""Replace an adapter again and again while eight clients use it.

Run `PLAIT_ADMIN_KEY=secret plait serve` first, then:
    PLAIT_ADMIN_KEY=secret python examples/hot_swap.py
Prints how many answers came from each of two generations, that none failed, and that each is the
one its generation gives.
"""

import asyncio
import os
from collections import Counter
from pathlib import Path

import httpx
from openai import AsyncOpenAI

PARTS = Path(__file__).parents[1] / "platform" / "demo" / "parts"
QUESTION = "Rewrite this politely: send me the invoice right now"
SERVER = "http://127.0.0.1:8000"
if "PLAIT_ADMIN_KEY" not in os.environ:
    raise SystemExit("set PLAIT_ADMIN_KEY, here and for the server: see above in this file")
admin = {"Authorization": f"Bearer {os.environ['PLAIT_ADMIN_KEY']}"}


async def swap(http: httpx.AsyncClient, folder: Path) -> str:
    """Let the name `live` point to the weights in a folder; returns their generation."""
    config = (folder / "adapter_config.json").read_text()
    answer = await http.post(
        f"{SERVER}/load_lora_adapter_from_tensors",
        params={"lora_name": "live", "config": config, "load_inplace": "true"},
        content=(folder / "adapter_model.safetensors").read_bytes(),
        headers={"Content-Type": "application/octet-stream"},
    )
    answer.raise_for_status()
    return answer.json()["generation"]


async def main() -> None:
    openai = AsyncOpenAI(base_url=f"{SERVER}/v1", api_key="none")
    answers: list[tuple[str, str]] = []  # generation and text
    done = asyncio.Event()

    async def ask() -> None:
        while not done.is_set():
            answer = await openai.chat.completions.create(
                model="live",
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0,
                max_tokens=16,
            )
            answers.append((answer.adapter_generation, answer.choices[0].message.content))

    async with openai, httpx.AsyncClient(headers=admin, timeout=60) as http:
        names = {await swap(http, PARTS / name): name for name in ("sql", "tone")}
        async with asyncio.TaskGroup() as clients:
            for _ in range(8):
                clients.create_task(ask())
            for number in range(6):
                generation = await swap(http, PARTS / ("sql", "tone")[number % 2])
                before = len(answers)
                while generation not in [answered for answered, _ in answers[before:]]:
                    await asyncio.sleep(0.01)
            done.set()
        await http.post(f"{SERVER}/v1/unload_lora_adapter", json={"lora_name": "live"})
    counts = Counter(names[generation] for generation, _ in answers)
    print(f"{len(answers)} answers over 6 swaps, none failed: {dict(counts)}")
    texts = set(answers)
    for generation, text in sorted(texts):
        print(f"{names[generation]} {generation[:12]}: {text!r}")
    print("each generation has one answer:", len(texts) == len(names))


asyncio.run(main())
