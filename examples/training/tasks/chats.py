"""Questions as people ask them in a chat, of topics and forms; some of both are for tests only."""

from __future__ import annotations

import random

from tasks.words import Split

HELD_IN = 0.8  # share of topics and of forms that training may use

_TOPICS = (
    "the sea", "bread", "a small garden", "winter", "trains", "learning a language", "the moon",
    "cats", "honesty", "old maps", "coffee", "rivers", "teamwork", "a rainy day", "music",
    "deserts", "sleep", "bridges", "birds", "patience", "cooking rice", "friendship", "computers",
    "mountains", "a first job", "museums", "saving money", "stars", "good habits", "bicycles",
    "forests", "a lost key", "volcanoes", "tea", "painting", "exercise", "whales", "city life",
    "gravity", "letters", "football", "bees", "time", "markets", "snow", "planets", "robots",
    "a family dinner", "the wind", "reading", "photosynthesis", "earthquakes", "democracy",
    "vaccines", "chess", "jazz", "the Roman Empire", "electric cars", "recycling", "dreams",
    "solar panels", "the French Revolution", "databases", "healthy breakfast", "public speaking",
    "the water cycle", "black holes", "stress at work", "online shopping", "a job interview",
    "climate change", "dogs", "sorting a list", "the stock market", "DNA", "world war two",
    "prime numbers", "meditation", "a birthday party", "the internet", "a broken phone",
    "antibiotics", "Shakespeare", "the Amazon rainforest", "a road trip", "user interfaces",
    "machine learning", "the human brain", "ancient Egypt", "basketball", "a late delivery",
    "oceans", "the immune system", "marketing", "fairy tales", "kitchen knives", "taxes",
    "remote work", "elephants", "the periodic table", "airports", "a new neighbour", "yoga",
    # for tests
    "camping", "penguins", "bacteria", "inflation", "poetry", "soil", "lighthouses",
    "the human heart", "dinosaurs", "tides", "a noisy office", "hospitals", "spreadsheets",
    "the Silk Road", "pasta", "graph theory", "wind turbines", "a school play", "honeymoon plans",
    "cyber security", "opera", "butterflies", "a job offer", "rockets", "chocolate", "libraries",
)  # fmt: skip
_FORMS = (
    "Tell me about {t}.", "Write a short story about {t}.", "Give me five facts about {t}.",
    "Explain {t} to a child.", "Why does {t} matter?", "Write a poem about {t}.",
    "What are the pros and cons of {t}?", "List three questions about {t} and answer them.",
    "How would you describe {t} to a friend?", "Write an email to a colleague about {t}.",
    "Give me tips that have to do with {t}.", "What is the history of {t}?",
    "Write a dialogue between two people about {t}.", "Make a plan for a day about {t}.",
    "What would happen without {t}?", "Write a product description that has to do with {t}.",
    "Write a python function that has something to do with {t}.", "Who should care about {t}?",
    "I know nothing about {t}. Where do I start?", "What do experts say about {t}?",
    "Summarize in two sentences: many people think about {t} every day, and few know enough of it.",
    "Rewrite this more politely: I do not want to hear about {t} again.",
    "Write a short blog post about {t}.", "Give me a list of ten words about {t}.",
    "Is {t} a good subject for a talk? Answer yes or no and say why.",
    "Can you help me with {t}?", "Write the introduction of an essay on {t}.",
    "What are the most common problems with {t} and how can they be solved?",
    "Correct the grammar: me and him was talking of {t} since two hour.",
    "Write a social media post about {t}.", "Give step-by-step instructions concerning {t}.",
    "Write a SQL query or a small program for an app about {t}.",
    # for tests
    "Summarize what people should know about {t}.", "Compare {t} with something else.",
    "What is interesting about {t}?", "Write a letter to the editor about {t}.",
    "Give an example that shows how {t} works.", "How has {t} changed over the years?",
    "Write a short speech about {t}.", "What are some ideas for a project on {t}?",
)  # fmt: skip


def make(split: Split, seed: int, count: int | None = None) -> list[str]:
    """`count` different prompts of a split, or all of them."""
    topics, forms = _part(_TOPICS, split), _part(_FORMS, split)
    prompts = [form.format(t=topic) for topic in topics for form in forms]
    random.Random(f"{split} {seed}").shuffle(prompts)
    return prompts[:count]


def _part(items: tuple[str, ...], split: Split) -> tuple[str, ...]:
    border = round(len(items) * HELD_IN)
    return items[:border] if split == "train" else items[border:]
