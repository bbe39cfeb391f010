"""Measure an adapter as it is served, beside the base, on examples that training never saw.

Run: python examples/training/evaluate.py fields|sql|tone [--count 200]
Writes the model card of platform/demo/parts/TASK.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from base_model import PARTS

from plait import LLM, SamplingParams

SEED = 20261
TITLES = {
    "fields": "a customer's message to five fields of JSON",
    "sql": "a table and a question to SQL",
    "tone": "a blunt message to a polite one",
}


def main() -> None:
    """Ask base and adapter the same, count what is right, write the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(TITLES))
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    task = importlib.import_module(f"tasks.{options.task}")
    examples = task.make("test", SEED, options.count)
    chats = [[{"role": "user", "content": e.prompt}] for e in examples]
    params = SamplingParams(temperature=0, max_tokens=120)
    right: dict[str, int] = {}
    with LLM(adapters={options.task: PARTS / options.task}) as llm:
        for adapter in (None, options.task):
            answers = [o.outputs[0].text for o in llm.chat(chats, params, adapter=adapter)]
            pairs = zip(examples, answers, strict=True)
            right[adapter or "base"] = sum(task.is_right(e, a.strip()) for e, a in pairs)
            for example, answer in list(zip(examples, answers, strict=True))[:3]:
                sys.stdout.write(f"{example.prompt!r}\n  -> {answer!r}\n")
    for name, count in right.items():
        sys.stdout.write(f"{name}: {count} of {options.count} right\n")
    _write_card(options.task, right, options.count)


def _write_card(name: str, right: dict[str, int], count: int) -> None:
    folder = PARTS / name
    config = json.loads((folder / "adapter_config.json").read_text())
    share = {who: f"{n} right ({100 * n / count:.0f} %)" for who, n in right.items()}
    (folder / "README.md").write_text(
        f"""# {name}: {TITLES[name]}

A LoRA adapter of SmolLM2-135M-Instruct (rank {config["r"]}, all linear layers, PEFT's format). It
is trained by `examples/training/train_adapter.py {name}` on examples that `tasks/{name}.py` beside
it makes from lists of words: no data from elsewhere. Answers alone are learned once, by AdamW.

Measured by `examples/training/evaluate.py {name}`, greedy, as served, on {count}
examples of words and phrasings that training never saw: {share[name]}, the base
{share["base"]}.

It knows this one task, in the wording of its examples, and no facts.
"""
    )


if __name__ == "__main__":
    main()
