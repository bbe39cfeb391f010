"""The same chat without drafts and with them: the same text, sooner where it copies.

Run: python examples/speculation.py [MODEL [DRAFT_MODEL]]
Prints for each question tokens per second without and with drafts, and how the drafts of each
source fared.
"""

import sys
import time

from plait import LLM, SamplingParams, Speculation

MODEL, DRAFT_MODEL, *_ = [*sys.argv[1:], None, None]
TEXT = (
    "On Tuesday, the committee approved a budget of 4,200 dollars for repairs to the old library "
    "roof, and Mrs. Henderson agreed to supervise the work until the end of October."
)
QUESTIONS = {
    "an edit": f"Repeat this text exactly, but replace Tuesday by Friday:\n\n{TEXT}",
    "free text": "What is the sea like in winter?",
}


def ask(llm: LLM, question: str, speculation: Speculation) -> tuple[str, float, dict]:
    params = SamplingParams(temperature=0, max_tokens=64)
    began = time.perf_counter()
    (output,) = llm.chat([{"role": "user", "content": question}], params, speculation=speculation)
    answer = output.outputs[0]
    return answer.text, len(answer.token_ids) / (time.perf_counter() - began), answer.drafts


with LLM(MODEL, draft_model=DRAFT_MODEL, progress=False) as llm:
    for name, question in QUESTIONS.items():
        ask(llm, question, Speculation(enabled=False))  # so that both find the prompt cached
        plain, plain_rate, _ = ask(llm, question, Speculation(enabled=False))
        drafted, rate, drafts = ask(llm, question, Speculation())
        fared = [f"{source} {held}/{tried}" for source, (tried, held) in drafts.items()]
        print(f"{name}: {plain_rate:.1f} tokens/s without drafts, {rate:.1f} with")
        print(f"  accepted of verified: {', '.join(fared) or 'none was worth it'}")
        print(f"  the same text: {plain == drafted}")
