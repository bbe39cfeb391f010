"""Stream an answer from a server with the openai package.

Run `plait serve` first, then: python examples/chat_stream.py
Prints a few rivers as they come, then a line such as "[31 prompt + 40 answer tokens, length]".
"""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Name three rivers."}],
    max_tokens=40,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
reason = None
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
        reason = chunk.choices[0].finish_reason or reason
    elif chunk.usage:
        usage = chunk.usage
        print(
            f"\n[{usage.prompt_tokens} prompt + {usage.completion_tokens} answer tokens, {reason}]"
        )
