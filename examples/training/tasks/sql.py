"""A table and a question to SQL; an answer is right if it finds the same rows."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass

from tasks.words import Example, Picker, Split

INSTRUCTION = "Write the SQL query that answers the question."


@dataclass(frozen=True, slots=True)
class Table:
    """A table with one text column to group by, and two of numbers."""

    name: str  # also what one row is called, in the plural
    label: str  # column that names a row
    place: str  # column of a few texts
    values: tuple[str, ...]  # that `place` has
    numbers: tuple[str, str]


_TABLES = (
    Table("employees", "name", "city", ("Oslo", "Lima", "Paris", "Cairo"), ("salary", "age")),
    Table("books", "title", "genre", ("crime", "poetry", "history", "travel"), ("pages", "year")),
    Table("cars", "model", "brand", ("Volvo", "Fiat", "Toyota", "Ford"), ("price", "power")),
    Table("students", "name", "school", ("North", "Hill", "Park", "River"), ("grade", "age")),
    Table("films", "title", "country", ("Spain", "Japan", "Brazil", "India"), ("length", "year")),
    Table("houses", "address", "town", ("York", "Bath", "Leeds", "Dover"), ("price", "rooms")),
    Table("orders", "product", "status", ("open", "paid", "sent", "lost"), ("amount", "total")),
    Table("players", "name", "team", ("Lions", "Bears", "Hawks", "Wolves"), ("goals", "age")),
    Table("hotels", "name", "city", ("Rome", "Delhi", "Quito", "Seoul"), ("stars", "price")),
    Table("songs", "title", "artist", ("Mara", "Indigo", "Tusk", "Nova"), ("seconds", "plays")),
    Table("flights", "code", "airline", ("Aero", "Jetway", "Polar", "Sunair"), ("seats", "delay")),
    Table("plants", "name", "family", ("fern", "rose", "mint", "palm"), ("height", "price")),
    # only in tests
    Table("ships", "name", "harbour", ("Genoa", "Malmo", "Izmir", "Cork"), ("tonnage", "speed")),
    Table("patients", "name", "ward", ("east", "west", "south", "upper"), ("age", "days")),
    Table("wines", "label", "region", ("Rioja", "Alsace", "Napa", "Douro"), ("price", "vintage")),
    Table("bridges", "name", "river", ("Rhine", "Tagus", "Loire", "Volga"), ("length", "height")),
)


def make(split: Split, seed: int, count: int) -> list[Example]:
    """`count` examples, the same for the same arguments."""
    pick = Picker(split, seed)
    return [_example(pick) for _ in range(count)]


def is_right(example: Example, answer: str) -> bool:
    """Whether both queries find the same in a table of random rows."""
    table = next(t for t in _TABLES if f"{t.name}(" in example.prompt)
    wanted, found = _run(table, example.answer), _run(table, answer)
    return found is not None and found == wanted


def _example(pick: Picker) -> Example:
    table = pick.one(_TABLES)
    question, query = pick.any(_QUESTIONS)(table, pick.rng)
    columns = ", ".join((table.label, table.place, *table.numbers))
    prompt = f"{INSTRUCTION}\n\nTable: {table.name}({columns})\nQuestion: {question}"
    return Example(prompt, query)


def _run(table: Table, query: str) -> list[tuple[object, ...]] | None:
    """What a query finds; None where it is none. Rows without an order are sorted."""
    rng = random.Random(table.name)
    with sqlite3.connect(":memory:") as db:
        columns = f"{table.label} TEXT, {table.place} TEXT, " + ", ".join(
            f"{n} INTEGER" for n in table.numbers
        )
        db.execute(f"CREATE TABLE {table.name} ({columns})")
        rows = [
            (f"{table.label} {i}", rng.choice(table.values), rng.randrange(100), rng.randrange(100))
            for i in range(60)
        ]
        db.executemany(f"INSERT INTO {table.name} VALUES (?, ?, ?, ?)", rows)
        db.execute("PRAGMA query_only = 1")
        db.set_progress_handler(lambda: 1, 100_000)  # ends what would run for long
        try:
            found = db.execute(query).fetchall()
        except (sqlite3.Error, sqlite3.Warning):
            return None
    return found if "ORDER BY" in query.upper() else sorted(found, key=repr)


# --- questions: each has several wordings and one query ---


def _count_of(t: Table, rng: random.Random) -> tuple[str, str]:
    value = rng.choice(t.values)
    question = rng.choice(
        (
            f"How many {t.name} have the {t.place} {value}?",
            f"What is the number of {t.name} with {t.place} {value}?",
            f"Count the {t.name} whose {t.place} is {value}.",
        )
    )
    return question, f"SELECT COUNT(*) FROM {t.name} WHERE {t.place} = '{value}'"


def _list_above(t: Table, rng: random.Random) -> tuple[str, str]:
    number, bound = rng.choice(t.numbers), rng.randrange(5, 95)
    word, sign = rng.choice((("more than", ">"), ("less than", "<"), ("at least", ">=")))
    question = rng.choice(
        (
            f"Which {t.name} have a {number} of {word} {bound}?",
            f"Show the {t.label} of all {t.name} with a {number} of {word} {bound}.",
            f"List the {t.name} whose {number} is {word} {bound}.",
        )
    )
    return question, f"SELECT {t.label} FROM {t.name} WHERE {number} {sign} {bound}"


def _extreme(t: Table, rng: random.Random) -> tuple[str, str]:
    number = rng.choice(t.numbers)
    word, order = rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    count = rng.choice((1, 3, 5))
    which = f"are the {count} {t.name}" if count > 1 else "is the one"
    question = rng.choice(
        (
            f"Among the {t.name}, which {which} with the {word} {number}?",
            f"Give the {t.label} of the {count} {t.name} with the {word} {number}.",
        )
    )
    return question, f"SELECT {t.label} FROM {t.name} ORDER BY {number} {order} LIMIT {count}"


def _aggregate(t: Table, rng: random.Random) -> tuple[str, str]:
    number = rng.choice(t.numbers)
    word, function = rng.choice(
        (("average", "AVG"), ("total", "SUM"), ("largest", "MAX"), ("smallest", "MIN"))
    )
    query = f"SELECT {function}({number}) FROM {t.name}"
    if rng.random() < 0.5:
        value = rng.choice(t.values)
        query += f" WHERE {t.place} = '{value}'"
        question = f"What is the {word} {number} of {t.name} with the {t.place} {value}?"
        return question, query
    return f"What is the {word} {number} of all {t.name}?", query


def _grouped(t: Table, rng: random.Random) -> tuple[str, str]:
    number = rng.choice(t.numbers)
    word, what = rng.choice(
        (
            (f"How many {t.name} are there", "COUNT(*)"),
            (f"What is the average {number}", f"AVG({number})"),
            (f"What is the total {number}", f"SUM({number})"),
        )
    )
    question = f"{word} for each {t.place}?"
    if what != "COUNT(*)":
        question = f"{word} of the {t.name} for each {t.place}?"
    return question, f"SELECT {t.place}, {what} FROM {t.name} GROUP BY {t.place}"


def _both(t: Table, rng: random.Random) -> tuple[str, str]:
    value, number, bound = rng.choice(t.values), rng.choice(t.numbers), rng.randrange(5, 95)
    question = rng.choice(
        (
            f"Which {t.name} with {t.place} {value} have a {number} above {bound}?",
            f"List all {t.name} of {t.place} {value} whose {number} is above {bound}.",
        )
    )
    query = f"SELECT {t.label} FROM {t.name} WHERE {t.place} = '{value}' AND {number} > {bound}"
    return question, query


_QUESTIONS = (_count_of, _list_above, _extreme, _aggregate, _grouped, _both)
