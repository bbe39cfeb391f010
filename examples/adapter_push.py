"""Reinforcement learning against a running server: push weights, sample, reward, update.

Run `PLAIT_ADMIN_KEY=secret plait serve` first, then:
    PLAIT_ADMIN_KEY=secret python examples/adapter_push.py
Prints each step's rewards; the answers become polite. To be quick, this trainer has one parameter,
the strength of the adapter `tone`, and estimates its gradient from two tries. Yours would have all
weights, and the samples' log-probabilities.
"""

import os
from pathlib import Path

import httpx
from safetensors.torch import load_file, save

NAME = "policy"
TONE = Path(__file__).parents[1] / "platform" / "demo" / "parts" / "tone"
CONFIG = (TONE / "adapter_config.json").read_text()
WEIGHTS = load_file(TONE / "adapter_model.safetensors")
PROMPT = "Rewrite this politely: send me the invoice right now"

if "PLAIT_ADMIN_KEY" not in os.environ:
    raise SystemExit("set PLAIT_ADMIN_KEY, here and for the server: see above in this file")
admin = {"Authorization": f"Bearer {os.environ['PLAIT_ADMIN_KEY']}"}
client = httpx.Client(base_url="http://127.0.0.1:8000", headers=admin, timeout=60)


def push(strength: float, before: str | None) -> str:
    """Put weights under the name; only over those that this trainer put there before."""
    tensors = {n: t * strength if "lora_B" in n else t for n, t in WEIGHTS.items()}
    query = {"lora_name": NAME, "config": CONFIG, "load_inplace": "true"}
    if before is not None:
        query["expected_generation"] = before
    answer = client.post(
        "/load_lora_adapter_from_tensors",
        params=query,
        content=save(tensors),
        headers={"Content-Type": "application/octet-stream"},
    )
    answer.raise_for_status()
    return answer.json()["generation"]


def sample(generation: str) -> list[dict]:
    """Four answers of these weights, and of no others."""
    body = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}], "n": 4}
    body |= {"max_tokens": 24, "temperature": 0.7, "seed": 1, "logprobs": True}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["adapter_generation"] == generation
    return answer["choices"]


def reward(choice: dict) -> float:
    """How much of what a polite request is made of an answer has."""
    text = choice["message"]["content"]
    return sum(word in text for word in ("Could you please", "invoice", "?")) / 3


generation, strength = None, 0.3
for step in range(3):
    rewards = []
    for trial in (strength - 0.2, strength + 0.2):
        generation = push(trial, generation)
        choices = sample(generation)
        rewards.append(sum(map(reward, choices)) / len(choices))
    text = choices[0]["message"]["content"]
    print(
        f"step {step}: strength {strength:.2f}, rewards {rewards[0]:.2f} {rewards[1]:.2f}, {text!r}"
    )
    strength += 0.5 * (rewards[1] - rewards[0])
client.post("/v1/unload_lora_adapter", json={"lora_name": NAME}).raise_for_status()
