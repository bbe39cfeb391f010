"""Ask LoRA adapters, each by its name in the place of the model's, with the openai package.

Run `plait serve` first, then: python examples/adapter_client.py
Prints what is served, then what the base and the adapter for it make of each question.
"""

from openai import OpenAI

QUESTIONS = {
    "fields": "Extract the fields of this message as JSON.\n\n"
    "Hello, the fish tank came scratched all over. My order is A-40213. I would like a refund. "
    "Best, Noah Bennett",
    "sql": "Write the SQL query that answers the question.\n\n"
    "Table: ships(name, harbour, tonnage, speed)\n"
    "Question: What is the average speed of ships with the harbour Genoa?",
    "tone": "Rewrite this politely: the coffee machine died on me, do something",
}

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
base, *adapters = [model.id for model in client.models.list()]
print(f"{base} with {', '.join(adapters)}")
for adapter, question in QUESTIONS.items():
    print(f"\n{question}")
    for model in (base, adapter):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=60,
        )
        print(f"  {model}: {answer.choices[0].message.content!r}")
