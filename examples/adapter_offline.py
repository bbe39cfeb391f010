"""Load LoRA adapters beside one model and answer with each of them in one batch.

Run: python examples/adapter_offline.py [ADAPTER ...]   (directories or hub ids for SmolLM2-135M)
Prints what was loaded, then one line for the base, for each adapter, and for two of them together.
Without an argument it makes two adapters of random weights: they show that each prompt gets its
own, not what a trained one can do.
"""

import sys

import torch

from plait import LLM, SamplingParams

CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
}


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """What PEFT would save for SmolLM2-135M: A and B of each site."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(30):
        for module, size in (("q_proj", 576), ("v_proj", 192)):
            site = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{site}.lora_A.weight"] = torch.randn(8, 576, generator=random) * 0.05
            tensors[f"{site}.lora_B.weight"] = torch.randn(size, 8, generator=random) * 0.2
    return tensors


with LLM() as llm:
    for number, source in enumerate(sys.argv[1:], 1):
        llm.load_adapter(f"adapter-{number}", source)
    if not llm.list_adapters():
        for seed in (1, 2):
            llm.load_adapter(f"random-{seed}", tensors=random_tensors(seed), config=CONFIG)
    for name, info in llm.list_adapters().items():
        print(f"{name}: {len(info.report.sites)} sites, generation {info.generation[:12]}")
    names = list(llm.list_adapters())
    choices = [None, *names]
    if len(names) > 1:
        choices.append([(names[0], 0.5), (names[1], 0.5)])
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = ["The capital of France is"] * len(choices)
    for choice, output in zip(choices, llm.generate(prompts, params, adapter=choices), strict=True):
        print(f"{choice or 'base'}: {output.outputs[0].text!r}")
