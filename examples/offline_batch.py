"""Answer a batch of prompts in this process, without a server.

Run: python examples/offline_batch.py [MODEL]
Prints each prompt with what follows it, then how many prompt tokens the prefix cache saved.
"""

import sys

from plait import LLM, SamplingParams

INTRODUCTION = "A list of capitals, each with its country. Berlin: Germany. Oslo: Norway. "

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    params = SamplingParams(temperature=0, max_tokens=8, stop=["."])
    prompts = [f"{INTRODUCTION}{city}:" for city in ("Paris", "Rome", "Madrid")]
    # The first prompt is computed alone, so that the others find its beginning in the cache.
    outputs = llm.generate(prompts[:1], params) + llm.generate(prompts[1:], params)
    for output in outputs:
        print(output.prompt.removeprefix(INTRODUCTION), output.outputs[0].text.strip())
    print("prompt tokens from the cache:", [output.num_cached_tokens for output in outputs])
