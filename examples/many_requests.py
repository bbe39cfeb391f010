"""Send sixteen requests at once; the server computes them in one batch.

Run `plait serve` first, then: python examples/many_requests.py
Prints sixteen short answers in order, then a line such as "16 answers, 256 tokens in 2.1 s".
"""

import asyncio
import time

from openai import AsyncOpenAI

CITIES = ["Paris", "Rome", "Madrid", "Lisbon", "Vienna", "Prague", "Warsaw", "Athens"] * 2


async def main() -> None:
    async with AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model=model, prompt=f"{city} is the capital of", max_tokens=16, temperature=0
                )
                for city in CITIES
            )
        )
    seconds = time.perf_counter() - began
    for city, answer in zip(CITIES, answers, strict=True):
        print(f"{city}: {answer.choices[0].text.strip()!r}")
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    print(f"{len(answers)} answers, {tokens} tokens in {seconds:.1f} s")


asyncio.run(main())
