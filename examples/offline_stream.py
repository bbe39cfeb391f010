"""Stream one chat answer in this process, with the log-probability of each token.

Run: python examples/offline_stream.py [MODEL]
Prints the answer as it comes, then its least likely token and its mean log-probability.
"""

import sys

from plait import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=48, logprobs=0)
    logprobs = []
    for delta in llm.stream_chat(messages, params):
        print(delta.text, end="", flush=True)
        logprobs.extend(delta.logprobs)
    rarest = min(logprobs, key=lambda token: token.logprob)
    mean = sum(token.logprob for token in logprobs) / len(logprobs)
    word = llm.tokenizer.token_text(rarest.token_id)
    print(f"\nleast likely: {word!r} at {rarest.logprob:.2f}; mean log-probability {mean:.2f}")
