"""Answer with several LoRA adapters in one batch, in this process.

Run: python examples/adapter_offline.py
Prints the adapters, then one line for the base, for each of two adapters, and for both together.
"""

from plait import LLM, SamplingParams

QUESTION = "Rewrite this politely: send me the invoice right now"
CHOICES = [None, "tone", "sql", [("tone", 0.7), ("sql", 0.3)]]

# Adapters of your own: LLM("path/or/hub-id", adapters={"mine": "path/or/hub-id"})
with LLM() as llm:
    for name, info in llm.list_adapters().items():
        print(f"{name}: {len(info.report.sites)} sites, generation {info.generation[:12]}")
    params = SamplingParams(temperature=0, max_tokens=24)
    chats = [[{"role": "user", "content": QUESTION}]] * len(CHOICES)
    for choice, output in zip(CHOICES, llm.chat(chats, params, adapter=CHOICES), strict=True):
        print(f"{choice or 'base'}: {output.outputs[0].text!r}")
