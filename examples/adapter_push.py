"""Push new weights of an adapter to a running server, as a trainer does after each step.

Run `PLAIT_ADMIN_KEY=secret plait serve` first, then:
    PLAIT_ADMIN_KEY=secret python examples/adapter_push.py [URL]
Prints the generation after each push, and that the answer came from it. The weights are random
ones for the embedded SmolLM2-135M.
"""

import json
import os
import sys

import httpx
import torch
from safetensors.torch import save

NAME = "policy"
CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj"]}

server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
admin = {"Authorization": f"Bearer {os.environ['PLAIT_ADMIN_KEY']}"}
client = httpx.Client(base_url=server, timeout=60)


def push(step: int, expected: str | None) -> str:
    """Load the weights of one step; only over those of the step before."""
    random = torch.Generator().manual_seed(step)
    tensors = {}
    for layer in range(30):
        site = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{site}.lora_A.weight"] = torch.randn(8, 576, generator=random) * 0.05
        tensors[f"{site}.lora_B.weight"] = torch.randn(192, 8, generator=random) * 0.2
    query = {"lora_name": NAME, "config": json.dumps(CONFIG), "load_inplace": "true"}
    if expected is not None:
        query["expected_generation"] = expected
    answer = client.post(
        "/load_lora_adapter_from_tensors",
        params=query,
        content=save(tensors),
        headers={"Content-Type": "application/octet-stream", **admin},
    )
    answer.raise_for_status()
    return answer.json()["generation"]


generation = None
for step in range(3):
    generation = push(step, generation)
    ask = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/completions", json=ask, headers=admin).json()
    assert answer["adapter_generation"] == generation
    print(f"step {step}: {generation[:12]} {answer['choices'][0]['text']!r}")
client.post("/v1/unload_lora_adapter", json={"lora_name": NAME}, headers=admin).raise_for_status()
