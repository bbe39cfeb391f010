"""What the default model and its adapters are asked where someone is to see what they do."""

from __future__ import annotations

import base64
import io
from typing import Any

_TO_JSON = "Extract the fields of this message as JSON.\n\n"
MESSAGES = (
    """Hello, the fish tank came scratched all over. My order is A-40213. I would like a refund. \
Best, Noah Bennett""",
    "I was charged twice for the umbrella. Ref. 99120. Could you explain this?",
    "This is Edith Ortiz. My tea pot came without its manual and screws. Send me another one.",
    "Where are the dinner plates I ordered? They should have been here days ago. Yours, Amara Toth",
)
_TO_SQL = "Write the SQL query that answers the question.\n\nTable: "
QUERIES = (
    """ships(name, harbour, tonnage, speed)
Question: What is the average speed of ships with the harbour Genoa?""",
    """wines(label, region, price, vintage)
Question: How many wines have the region Rioja?""",
    """bridges(name, river, length, height)
Question: Give the name of the 3 bridges with the highest length.""",
    """patients(name, ward, age, days)
Question: Which patients have an age of more than 60?""",
)
_POLITELY = "Rewrite this politely: "
BLUNT = (
    "the coffee machine died on me, do something",
    "send me the invoice right now",
    "no way I work late on Friday",
    "the printer is broken AGAIN",
)
CHATS = (
    "Name three rivers.",
    "What is the sea like in winter?",
    "Why do cats sleep so much?",
    "Give me two reasons to learn a language.",
)
FIELDS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": ["string", "null"], "maxLength": 30},
        "order": {"type": ["string", "null"], "maxLength": 12},
        "product": {"type": "string", "maxLength": 30},
        "problem": {"enum": ["late", "damaged", "wrong item", "missing part", "billing"]},
        "wish": {"enum": ["refund", "replacement", "information"]},
    },
    "required": ["name", "order", "product", "problem", "wish"],
    "additionalProperties": False,
}
# An answer that copies most of what it is asked.
COPY = (
    "Repeat this text exactly, but replace Tuesday by Friday:\n\n"
    "On Tuesday, the committee approved a budget of 4,200 dollars for repairs to the old library "
    "roof, and Mrs. Henderson agreed to supervise the work until the end of October."
)
LOOK = "What is in the picture?"
DESCRIBE = "Describe the picture as JSON."
COLOURS = {"red": (214, 40, 40), "blue": (38, 84, 214), "green": (30, 150, 62)}
# The form that `sight` learned.
PICTURE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["shapes", "digit", "word"]},
        "colour": {"type": "string", "maxLength": 9},
        "what": {"type": "string", "maxLength": 9},
        "count": {"type": "integer", "maximum": 5},
    },
    "required": ["kind", "colour", "what", "count"],
    "additionalProperties": False,
}

_SIZE = 96
_PLACES = ((12, 36), (60, 12), (36, 84), (84, 60), (12, 84))  # middles of squares
_HALF = 9


def message(number: int = 0) -> str:
    """A question for the adapter `fields`."""
    return _TO_JSON + MESSAGES[number]


def query(number: int = 0) -> str:
    """A question for the adapter `sql`."""
    return _TO_SQL + QUERIES[number]


def blunt(number: int = 0) -> str:
    """A question for the adapter `tone`."""
    return _POLITELY + BLUNT[number]


def squares(count: int, colour: str) -> bytes:
    """A PNG file with up to five squares: so few bytes that it can be read in a terminal."""
    from PIL import Image, ImageDraw

    image = Image.new("P", (_SIZE, _SIZE), 0)
    image.putpalette([240, 236, 236, *COLOURS[colour]])
    draw = ImageDraw.Draw(image)
    for x, y in _PLACES[:count]:
        draw.rectangle((x - _HALF, y - _HALF, x + _HALF, y + _HALF), fill=1)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True, bits=1)
    return file.getvalue()


def data_url(picture: bytes) -> str:
    """An address that is itself the file."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()
