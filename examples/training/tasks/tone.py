"""A blunt message to a polite one that says the same; each meaning has one polite wording."""

from __future__ import annotations

from tasks.words import Example, Picker, Split

INSTRUCTION = "Rewrite this politely:"

_THINGS = (
    "report", "invoice", "contract", "schedule", "budget", "slides", "price list", "draft",
    "photos", "meeting notes", "test results", "address list", "floor plan", "receipts",
    "logo", "travel plan", "survey", "menu", "password list", "manual", "timetable", "minutes",
    "order form", "sales figures", "guest list", "recipe", "blueprint", "certificate",
)  # fmt: skip
_ACTIONS = (
    ("send me", "send me"), ("fix", "correct"), ("check", "check"), ("finish", "finish"),
    ("print", "print"), ("translate", "translate"), ("update", "update"), ("sign", "sign"),
    ("redo", "revise"), ("forward me", "forward me"), ("upload", "upload"), ("shorten", "shorten"),
)  # fmt: skip
_MACHINES = (
    "printer", "heating", "website", "elevator", "coffee machine", "projector", "app", "scanner",
    "air conditioning", "door lock", "phone line", "payment page", "car park gate", "fridge",
    "search page", "alarm system", "water pump", "ticket machine",
)  # fmt: skip
_FAULTS = (
    ("is broken", "is not working"),
    ("crashed", "stopped working"),
    ("is way too slow", "is rather slow"),
    ("is a mess", "needs some attention"),
    ("makes a horrible noise", "is making an unusual noise"),
    ("died on me", "stopped working"),
    ("is useless", "is not working as expected"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_EVENTS = (
    ("come to the party", "come to the party"),
    ("work late", "work late"),
    ("join your call", "join your call"),
    ("help you move", "help you move"),
    ("cover your shift", "cover your shift"),
    ("give the talk", "give the talk"),
    ("lend you my car", "lend you my car"),
    ("babysit", "look after the children"),
    ("cook for everyone", "cook for everyone"),
    ("drive you to the airport", "drive you to the airport"),
    ("pay for lunch", "pay for lunch"),
    ("write your essay", "write your essay"),
)


def make(split: Split, seed: int, count: int) -> list[Example]:
    """`count` examples, the same for the same arguments."""
    pick = Picker(split, seed)
    return [pick.any((_request, _complaint, _refusal, _question))(pick) for _ in range(count)]


def is_right(example: Example, answer: str) -> bool:
    """Whether an answer is the polite wording."""
    return " ".join(answer.split()) == example.answer


def _example(pick: Picker, blunt: str, polite: str) -> Example:
    if pick.rng.random() < 0.5:
        blunt = blunt.lower()
    return Example(f"{INSTRUCTION} {blunt}", polite)


def _request(pick: Picker) -> Example:
    (rough, kind), thing = pick.one(_ACTIONS), pick.one(_THINGS)
    day = pick.any(_DAYS)
    when, polite_when = pick.any(
        (
            ("now", "as soon as possible"),
            ("right now", "as soon as possible"),
            ("asap", "as soon as possible"),
            (f"by {day}", f"by {day}"),
            (f"before {day} or else", f"before {day}"),
            ("today, no excuses", "today"),
        )
    )
    blunt = pick.one(
        (
            f"{rough} the {thing} {when}",
            f"{rough} the {thing} {when}!!",
            f"hey, {rough} the {thing} {when}",
            f"I said {rough} the {thing} {when}",
            f"just {rough} the {thing} {when}",
            f"how hard can it be? {rough} the {thing} {when}",
            f"stop sleeping and {rough} the {thing} {when}",
            f"for the last time, {rough} the {thing} {when}",
        )
    )
    return _example(pick, blunt, f"Could you please {kind} the {thing} {polite_when}?")


def _complaint(pick: Picker) -> Example:
    machine, (rough, kind) = pick.one(_MACHINES), pick.any(_FAULTS)
    blunt = pick.one(
        (
            f"your stupid {machine} {rough}",
            f"the {machine} {rough} AGAIN",
            f"the damn {machine} {rough}, do something",
            f"why does nobody care that the {machine} {rough}",
            f"the {machine} {rough}, what a joke",
            f"unbelievable, the {machine} {rough}",
            f"the {machine} {rough} and you people do nothing",
            f"great job, the {machine} {rough}",
        )
    )
    polite = f"I am sorry to report that the {machine} {kind}. Could you please have a look?"
    return _example(pick, blunt, polite)


def _refusal(pick: Picker) -> Example:
    (rough, kind), day = pick.one(_EVENTS), pick.any(_DAYS)
    blunt = pick.one(
        (
            f"no way I {rough} on {day}",
            f"forget it, I won't {rough} on {day}",
            f"I'm not going to {rough} on {day}, ever",
            f"{day}? nope, I don't {rough}",
            f"you must be kidding, I won't {rough} on {day}",
            f"why would I {rough} on {day}? no",
            f"{rough} on {day}? not me",
            f"nah, not gonna {rough} on {day}",
        )
    )
    return _example(pick, blunt, f"Thank you for asking, but I am afraid I cannot {kind} on {day}.")


def _question(pick: Picker) -> Example:
    thing = pick.one(_THINGS)
    blunt = pick.one(
        (
            f"where the hell is the {thing}",
            f"where is my {thing}??",
            f"so where's the {thing} then",
            f"I still don't have the {thing}, are you asleep",
            f"the {thing}. where is it",
            f"did you lose the {thing} or what",
            f"what happened to the {thing}, genius",
            f"still no {thing}, unbelievable",
        )
    )
    return _example(pick, blunt, f"Could you please tell me where I can find the {thing}?")
