"""A customer's message to five fields of JSON: who, order, product, problem, wish."""

from __future__ import annotations

import json

from tasks.words import FIRST_NAMES, LAST_NAMES, PRODUCTS, Example, Picker, Split

INSTRUCTION = "Extract the fields of this message as JSON."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": ["string", "null"]},
        "order": {"type": ["string", "null"]},
        "product": {"type": "string"},
        "problem": {"enum": ["late", "damaged", "wrong item", "missing part", "billing"]},
        "wish": {"enum": ["refund", "replacement", "information"]},
    },
    "required": ["name", "order", "product", "problem", "wish"],
    "additionalProperties": False,
}

_PROBLEMS = {
    "late": (
        "the {p} still has not arrived",
        "I have been waiting two weeks for the {p}",
        "my {p} was due last Monday and nothing came",
        "where is the {p} I ordered? It should have been here days ago",
        "delivery of the {p} keeps being postponed",
        "the tracking of my {p} has not moved since last week",
        "no sign of the {p} yet although you promised Friday",
        "I am still without the {p}, far past the delivery date",
    ),
    "damaged": (
        "the {p} arrived broken",
        "the {p} has a big crack in it",
        "when I opened the box the {p} was in pieces",
        "my {p} came scratched all over",
        "the {p} was smashed on the way",
        "there is a dent in the {p} you sent",
        "the {p} does not switch on, it must have been dropped",
        "the {p} reached me bent and torn",
    ),
    "wrong item": (
        "I ordered a {p} but got something else",
        "instead of the {p} there was a different article in the parcel",
        "this is not the {p} I bought",
        "you sent me the wrong {p}",
        "the {p} is of another colour than the one I chose",
        "the {p} I received is a different model from the one on my invoice",
        "you mixed up my {p} with another customer's",
        "the size of the {p} is not what I picked",
    ),
    "missing part": (
        "a part of the {p} is missing",
        "the {p} came without its manual and screws",
        "the cable of the {p} was not in the box",
        "I cannot use the {p} because one piece was not included",
        "the lid that belongs to the {p} is nowhere in the package",
        "half of the accessories for the {p} were left out",
        "the box of the {p} was incomplete",
        "something is lacking from the {p} set",
    ),
    "billing": (
        "I was charged twice for the {p}",
        "the price on the bill for the {p} is wrong",
        "you took more money for the {p} than agreed",
        "the discount on the {p} was not applied",
        "my card was debited again for the {p}",
        "the invoice for the {p} shows the wrong amount",
        "I paid for one {p} and was billed for three",
        "there is a fee on the {p} that nobody mentioned",
    ),
}
_WISHES = {
    "refund": (
        "I want my money back", "please refund me", "kindly return the payment to my account",
        "I would like a refund", "give me back what I paid", "I expect the full amount back",
        "just reimburse me", "please transfer the money back to me",
    ),
    "replacement": (
        "please send a new one", "I would like a replacement", "can you exchange it?",
        "ship me another one", "I need it replaced", "swap it for a proper one, please",
        "send the right one as soon as you can", "a fresh one would settle it",
    ),
    "information": (
        "can you tell me what happened?", "please let me know what is going on",
        "I just want to know what you will do", "could you explain this?",
        "what should I do now?", "please give me an update", "I would like to hear the reason",
        "an explanation would be welcome",
    ),
}  # fmt: skip
_NAMED = (
    "My name is {n}.", "This is {n}.", "{n} here.", "I am {n}.",
    "You can find me under {n}.", "I bought it as {n}.", "The account is {n}'s.",
)  # fmt: skip
_SIGNED = ("Regards, {n}", "Thanks, {n}", "Best, {n}", "{n}", "Yours, {n}", "Greetings from {n}")
_ORDERS = (
    "Order number {o}.", "My order is {o}.", "It is about order {o}.", "(order {o})",
    "The number on the invoice is {o}.", "Ref. {o}.", "See purchase {o}.", "Order no. {o}.",
)  # fmt: skip
_GREETINGS = (
    "Hi,",
    "Hello,",
    "Dear team,",
    "Good morning,",
    "",
    "",
    "Hey there,",
    "To whom it may concern,",
)


def make(split: Split, seed: int, count: int) -> list[Example]:
    """`count` examples, the same for the same arguments."""
    pick = Picker(split, seed)
    return [_example(pick) for _ in range(count)]


def is_right(example: Example, answer: str) -> bool:
    """Whether an answer has all five fields right."""
    try:
        return bool(json.loads(answer) == json.loads(example.answer))
    except ValueError:
        return False


def _example(pick: Picker) -> Example:
    rng = pick.rng
    name = f"{pick.one(FIRST_NAMES)} {pick.one(LAST_NAMES)}" if rng.random() < 0.8 else None
    order = _order(pick) if rng.random() < 0.75 else None
    product = pick.one(PRODUCTS)
    problem, wish = pick.any(sorted(_PROBLEMS)), pick.any(sorted(_WISHES))
    signed = name is not None and rng.random() < 0.5
    middle = [_sentence(pick.one(_PROBLEMS[problem]).format(p=product))]
    if order is not None:
        middle.append(pick.one(_ORDERS).format(o=order))
    if name is not None and not signed:
        middle.append(pick.one(_NAMED).format(n=name))
    rng.shuffle(middle)
    text = [pick.one(_GREETINGS), *middle, _sentence(pick.one(_WISHES[wish]))]
    if signed:
        text.append(pick.one(_SIGNED).format(n=name))
    fields = {"name": name, "order": order, "product": product, "problem": problem, "wish": wish}
    message = " ".join(part for part in text if part)
    return Example(f"{INSTRUCTION}\n\n{message}", json.dumps(fields, separators=(",", ":")))


def _order(pick: Picker) -> str:
    digits = "".join(pick.rng.choices("0123456789", k=pick.rng.choice((5, 6))))
    return digits if pick.rng.random() < 0.6 else pick.any(("A-", "B", "PL", "X-")) + digits


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".?!" else text + "."
