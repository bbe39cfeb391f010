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
# Told in few ways, the task is learned soon, but not what is told in others: behind so many
# examples of training there are more ways.
_FEW_WAYS = 1200
_TOLD_TOO = {
    "late": (
        "the {p} is overdue", "I am waiting for the {p} since ten days", "when will the {p} come?",
        "the {p} did not come in time", "still nothing, the {p} has not been delivered",
        "the delivery of the {p} is delayed again", "the {p} should have been here on Tuesday",
        "you said two days, and the {p} is not here yet", "has the {p} been shipped at all?",
        "my {p} is stuck somewhere on its way", "nobody delivered the {p}", "the {p} takes forever",
        "it has been a month and I do not have my {p}", "the {p} was promised for yesterday",
    ),
    "damaged": (
        "the {p} is broken", "the {p} stopped working on the first day", "the {p} is defective",
        "the {p} came with a broken handle", "the {p} fell apart when I unpacked it",
        "the {p} is cracked on one side", "the {p} does not work", "my {p} arrived in bad shape",
        "the {p} has scratches", "the {p} leaks", "the {p} must have been crushed in the post",
        "the {p} is ruined", "the {p} was delivered with a hole in it",
        "the {p} cannot be turned on",
    ),
    "wrong item": (
        "you delivered something else than the {p}", "the {p} is not the one that I ordered",
        "I got another article and not the {p}", "the {p} has the wrong size",
        "the {p} came in the wrong colour", "that is not my {p}", "I asked for a different {p}",
        "the parcel held somebody else's order and not my {p}", "the {p} is the wrong version",
        "I never ordered this {p}", "the {p} does not match what I chose in the shop",
        "I received a {p} that belongs to another order", "the {p} is of the wrong type",
        "the {p} that came looks nothing like the picture",
    ),
    "missing part": (
        "the {p} lacks a screw", "there is no cable with the {p}", "the {p} is not complete",
        "one piece of the {p} was not there", "the {p} came without its lid",
        "no manual for the {p}",
        "two parts of the {p} are missing", "I miss the battery of the {p}",
        "the {p} was delivered without the charger", "not everything for the {p} was in the box",
        "the instructions of the {p} were not included", "where is the rest of the {p}?",
        "I only got half of the {p}", "the small bag of parts for the {p} was empty",
    ),
    "billing": (
        "you charged me too much for the {p}", "I paid twice for the {p}",
        "the invoice of the {p} is not right", "my coupon for the {p} did not count",
        "the {p} costs more on the bill than in the shop", "the sum for the {p} is too high",
        "there are two payments for one {p}", "why was I billed again for the {p}?",
        "you debited the {p} three times", "the bill lists a {p} that I returned",
        "I was promised a lower price for the {p}", "my account was charged for a second {p}",
        "the tax on the {p} is wrong", "shipping of the {p} was free and now it is on the bill",
    ),
}  # fmt: skip
_WISHED_TOO = {
    "refund": (
        "I want a refund", "pay me back", "I would like my money returned", "refund the order",
        "please give the money back", "I expect to be repaid", "send back my payment",
        "I ask for the full price back", "reimburse the amount, please", "return what I paid",
    ),
    "replacement": (
        "please replace it", "I want another one", "exchange it, please", "send me a new one",
        "I would like to swap it", "please ship a replacement", "I need a proper one",
        "could you send the correct one?", "give me a new one instead", "I hope for an exchange",
    ),
    "information": (
        "please explain", "can you tell me why?", "what is going on?", "I would like to know more",
        "please inform me", "how could this happen?", "let me know what to do", "any news?",
        "please tell me what comes next", "I want to understand this", "could you look into it?",
    ),
}  # fmt: skip
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
    return [_example(pick, many_ways=i >= _FEW_WAYS) for i in range(count)]


def is_right(example: Example, answer: str) -> bool:
    """Whether an answer has all five fields right."""
    try:
        return bool(json.loads(answer) == json.loads(example.answer))
    except ValueError:
        return False


def _example(pick: Picker, *, many_ways: bool) -> Example:
    rng = pick.rng
    name = f"{pick.one(FIRST_NAMES)} {pick.one(LAST_NAMES)}" if rng.random() < 0.8 else None
    order = _order(pick) if rng.random() < 0.75 else None
    product = pick.one(PRODUCTS)
    problem, wish = pick.any(sorted(_PROBLEMS)), pick.any(sorted(_WISHES))
    signed = name is not None and rng.random() < 0.5
    more = many_ways and pick.split == "train"
    told = _way(pick, _PROBLEMS[problem], _TOLD_TOO[problem] if more else ())
    middle = [_sentence(told.format(p=product))]
    if order is not None:
        middle.append(pick.one(_ORDERS).format(o=order))
    if name is not None and not signed:
        middle.append(pick.one(_NAMED).format(n=name))
    rng.shuffle(middle)
    greeting = pick.one(_GREETINGS)
    wished = _way(pick, _WISHES[wish], _WISHED_TOO[wish] if more else ())
    text = [greeting, *middle, _sentence(wished)]
    if signed:
        text.append(pick.one(_SIGNED).format(n=name))
    fields = {"name": name, "order": order, "product": product, "problem": problem, "wish": wish}
    message = " ".join(part for part in text if part)
    return Example(f"{INSTRUCTION}\n\n{message}", json.dumps(fields, separators=(",", ":")))


def _way(pick: Picker, ways: tuple[str, ...], more: tuple[str, ...]) -> str:
    return pick.any(more) if more and pick.rng.random() < 0.8 else pick.one(ways)


def _order(pick: Picker) -> str:
    digits = "".join(pick.rng.choices("0123456789", k=pick.rng.choice((5, 6))))
    return digits if pick.rng.random() < 0.6 else pick.any(("A-", "B", "PL", "X-")) + digits


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".?!" else text + "."
