"""Questions about a picture, asked of its caption, which is how the vision tower lets it be read.

The tower's slots are embeddings of a caption's tokens, so a prompt of text in the same places
teaches the same as the picture would, without any picture being drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from renders import COLOURS, SHAPES, WORDS, Scene, any_scene
from tasks.words import Example, Picker, Split

from plait.platform.demo.questions import DESCRIBE

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["shapes", "digit", "word"]},
        "colour": {"enum": list(COLOURS)},
        "what": {"enum": [*SHAPES, *map(str, range(10)), *sorted({*WORDS} - {*SHAPES})]},
        "count": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["kind", "colour", "what", "count"],
    "additionalProperties": False,
}

_JSON = (
    DESCRIBE, "Answer in JSON: what is in the picture?", "Give the picture's facts as JSON.",
    "What does the picture show? Answer in JSON.", "Return a JSON description of the picture.",
    "Picture to JSON, please.", "Write down what you see as a JSON object.",
    "Picture facts in JSON form.",
)  # fmt: skip
# With keys of the asker's own, so that values follow what a schema calls for.
_KEYS = (
    "Give {keys} as JSON.", "Answer in JSON with {keys}.", "A JSON object of {keys}, please.",
    "What is in the picture? Reply in JSON with {keys}.",
)  # fmt: skip
_SHOWN = (
    "What does the picture show?", "What is in the picture?", "What do you see?",
    "Describe the picture.", "What is this?", "What can be seen here?",
    "Tell me what is shown.", "Say in a few words what this is.",
)  # fmt: skip
_COLOUR = (
    "Which colour is it?", "What colour do you see?", "What is the colour?", "Name the colour.",
    "What color is it?", "Which colour does the {thing} have?", "What color is the {thing}?",
    "In which colour is the {thing} drawn?", "What colour is this {thing}?", "Tell me the colour.",
)  # fmt: skip
_COUNT = (
    "How many shapes are there?", "How many {shape}s are in the picture?", "Count the shapes.",
    "How many do you see?", "How many {shape}s can you count?", "What is the number of shapes?",
    "How many shapes does the picture show?", "How many {shape}s are there?",
)  # fmt: skip
_SHAPE = (
    "Which shape is it?", "What shape do you see?", "Name the shape.", "What is the shape?",
    "Which shape does the picture show?", "What kind of shape is this?",
    "Which shape is in the picture?", "Tell me the shape.",
)  # fmt: skip
_DIGIT = (
    "Which digit is it?", "What digit do you see?", "Read the digit.", "What number is shown?",
    "Which digit is in the picture?", "What is the digit?", "Which number do you see?",
    "Tell me the digit.",
)  # fmt: skip
_WORD = (
    "Which word is it?", "What word do you see?", "Read the word.", "What does it say?",
    "Which word is in the picture?", "What is written here?", "Read the text.",
    "Tell me the word.",
)  # fmt: skip

_Asker = Callable[[Picker, Scene], Example]


def make(split: Split, seed: int, count: int) -> list[Example]:
    """`count` examples, the same for the same arguments."""
    pick = Picker(split, seed)
    return [_make(pick) for _ in range(count)]


def _make(pick: Picker) -> Example:
    scene = any_scene(pick.rng)
    asked = pick.rng.choice(askers(scene))(pick, scene)
    return Example(f"Picture:{''.join(scene.slots)}\n{asked.prompt}", asked.answer)


def askers(scene: Scene) -> tuple[_Asker, ...]:
    """What can be asked of a scene."""
    own = {"shapes": (_ask_count, _ask_shape), "digit": (_ask_digit,), "word": (_ask_word,)}
    return (*own[scene.kind], _ask_colour, _ask_shown, _ask_json, _ask_keys)


def is_right(example: Example, answer: str) -> bool:
    """Whether an answer is the one wanted, whatever spaces JSON has."""
    return _plain(answer) == _plain(example.answer)


def _plain(answer: str) -> Any:
    try:
        return json.loads(answer)
    except ValueError:
        return answer.strip().rstrip(".").lower()


def facts(scene: Scene) -> dict[str, Any]:
    """What `SCHEMA` asks for."""
    what = scene.shape or scene.text
    return {
        "kind": scene.kind, "colour": scene.colour, "what": what, "count": max(1, scene.count),
    }  # fmt: skip


def _compact(values: dict[str, Any]) -> str:
    """Without spaces, as answers in a schema are."""
    return json.dumps(values, separators=(",", ":"))


def _ask_json(pick: Picker, scene: Scene) -> Example:
    return Example(pick.one(_JSON), _compact(facts(scene)))


def _ask_keys(pick: Picker, scene: Scene) -> Example:
    values: dict[str, Any] = {"colour": scene.colour, "kind": scene.kind}
    if scene.kind == "shapes":
        values |= {"shape": scene.shape, "count": scene.count}
    else:
        values |= {scene.kind: scene.text}
    keys = pick.rng.sample(sorted(values), pick.rng.randint(2, 3))
    listed = f"{', '.join(keys[:-1])} and {keys[-1]}"
    answer = _compact({key: values[key] for key in keys})
    return Example(pick.one(_KEYS).format(keys=listed), answer)


def _ask_shown(pick: Picker, scene: Scene) -> Example:
    return Example(pick.one(_SHOWN), scene.caption[0].upper() + scene.caption[1:] + ".")


def _ask_colour(pick: Picker, scene: Scene) -> Example:
    thing = scene.shape or scene.kind
    return Example(pick.one(_COLOUR).format(thing=thing), scene.colour)


def _ask_count(pick: Picker, scene: Scene) -> Example:
    # Now and then of a shape that is not there: it is not to count whatever there is.
    if pick.rng.random() < 0.15:
        other = pick.rng.choice([s for s in SHAPES if s != scene.shape])
        return Example(f"How many {other}s are there?", "0")
    return Example(pick.one(_COUNT).format(shape=scene.shape), str(scene.count))


def _ask_shape(pick: Picker, scene: Scene) -> Example:
    return Example(pick.one(_SHAPE), scene.shape)


def _ask_digit(pick: Picker, scene: Scene) -> Example:
    return Example(pick.one(_DIGIT), scene.text)


def _ask_word(pick: Picker, scene: Scene) -> Example:
    return Example(pick.one(_WORD), scene.text)
