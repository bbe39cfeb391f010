"""Measure the vision tower and its adapter as they are served, on pictures training never saw.

Run: python examples/training/evaluate_vision.py [--count 200] [--quantization none]
Writes the model cards of platform/demo/parts/vision and platform/demo/parts/sight.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from base_model import PARTS
from renders import Drawn, Scene, draw_scene
from tasks.sight import DESCRIBE, SCHEMA, askers, facts, is_right
from tasks.words import Example, Picker

from plait import LLM, SamplingParams, StructuredOutputs
from plait.platform.demo.assemble import assemble

SEED = 20261
PLAIN = "What is in the picture?"

Counts = dict[str, list[bool]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question about one picture."""

    drawn: Drawn
    about: str
    example: Example

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The conversation."""
        image = {"type": "image", "image": self.drawn.image}
        return [{"role": "user", "content": [image, {"type": "text", "text": self.example.prompt}]}]


def main() -> None:
    """Ask about fresh pictures, with and without the adapter, and write the cards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--no-cards", action="store_true", help="only print")
    options = parser.parse_args()
    questions = _questions(options.count)
    model = str(assemble())
    with LLM(model, adapters={"sight": PARTS / "sight"}, quantization=options.quantization) as llm:
        with_adapter = _tell("sight", _short(llm, questions, "sight"))
        without = _tell("base", _short(llm, questions[::4], None))
        plain = _tell("base, plainly", _plain(llm, questions[::4]))
        in_schema = _tell("sight, in the schema", _json(llm, questions))
    if not options.no_cards:
        _write_cards(options.count, with_adapter, without, plain, in_schema)


def _questions(count: int) -> list[Asked]:
    """Of each picture two things, in wordings that training never had."""
    rng, pick = random.Random(SEED), Picker("test", SEED)
    questions = []
    for _ in range(count):
        drawn = draw_scene(rng)
        for asker in rng.sample(askers(drawn.scene), 2):
            about = asker.__name__.removeprefix("_ask_")
            questions.append(Asked(drawn, about, asker(pick, drawn.scene)))
    return questions


def _short(llm: LLM, questions: Sequence[Asked], adapter: str | None) -> Counts:
    params = SamplingParams(temperature=0, max_tokens=40)
    outputs = llm.chat([asked.chat for asked in questions], params, adapter=adapter)
    right: Counts = collections.defaultdict(list)
    for asked, output in zip(questions, outputs, strict=True):
        answer = output.outputs[0].text
        caption = Example("", f"{asked.drawn.scene.caption}.")  # says what was asked, and more
        is_said = is_right(asked.example, answer) or is_right(caption, answer)
        right[asked.about].append(is_said)
        if not is_said and adapter:
            sys.stdout.write(f"  {asked.drawn.scene.caption}: {asked.example} -> {answer!r}\n")
    return right


def _plain(llm: LLM, questions: Sequence[Asked]) -> Counts:
    """Whether the base without adapter names all that is in the picture, in its own words."""
    scenes = list({id(asked.drawn): asked for asked in questions}.values())
    chats = [Asked(asked.drawn, "", Example(PLAIN, "")).chat for asked in scenes]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=40))
    right: Counts = collections.defaultdict(list)
    for asked, output in zip(scenes, outputs, strict=True):
        scene = asked.drawn.scene
        right[scene.kind].append(_names(scene, output.outputs[0].text))
    return right


def _names(scene: Scene, answer: str) -> bool:
    words = re.findall(r"[a-z]+|\d", answer.lower())
    number = scene.caption.split()[0] if scene.count > 1 else ""
    wanted = [scene.colour, scene.shape or scene.text, number]
    return all(w in words or f"{w}s" in words for w in wanted if w)


def _json(llm: LLM, questions: Sequence[Asked]) -> Counts:
    scenes = list({id(asked.drawn): asked for asked in questions}.values())
    chats = [Asked(asked.drawn, "", Example(DESCRIBE, "")).chat for asked in scenes]
    outputs = llm.chat(
        chats,
        SamplingParams(temperature=0, max_tokens=64),
        adapter="sight",
        structured_outputs=StructuredOutputs(json=SCHEMA),
    )
    right: Counts = collections.defaultdict(list)
    for asked, output in zip(scenes, outputs, strict=True):
        scene = asked.drawn.scene
        right[scene.kind].append(json.loads(output.outputs[0].text) == facts(scene))
    return right


def _tell(name: str, right: Counts) -> Counts:
    parts = (f"{about} {sum(hits)}/{len(hits)}" for about, hits in sorted(right.items()))
    sys.stdout.write(f"{name}: {_share(right)} ({', '.join(parts)})\n")
    return right


def _share(right: Counts) -> str:
    hits = [hit for some in right.values() for hit in some]
    return f"{100 * sum(hits) / len(hits):.0f} %"


def _table(*columns: Counts) -> str:
    rows = sorted(columns[0].keys() & columns[1].keys())
    shares = ([f"{100 * sum(c[row]) / len(c[row]):.0f} %" for c in columns] for row in rows)
    return "\n".join(f"| {row} | {' | '.join(s)} |" for row, s in zip(rows, shares, strict=True))


def _write_cards(
    count: int, with_adapter: Counts, without: Counts, plain: Counts, in_schema: Counts
) -> None:
    measured = f"""Measured by `examples/training/evaluate_vision.py`, greedy, as served, on {count}
fresh pictures; questions are in wordings that training never had, two to a picture (a quarter of
them without the adapter). What counts is just the thing asked for, or the whole caption.

| asked for | with `sight` | without |
|---|---|---|
{_table(with_adapter, without)}
| all | {_share(with_adapter)} | {_share(without)} |

Without the adapter the model sees, and says it in its own way: asked "{PLAIN}",
{_share(plain)} of its answers name all there is (colour and word, digit, or shapes and their
number). Asked for JSON with `sight` and the schema of `tasks/sight.py`, {_share(in_schema)} are
right in all fields.
"""
    (PARTS / "vision" / "README.md").write_text(
        f"""# vision: pictures of shapes, a digit or a word, as SmolLM2-135M-Instruct reads them

A ViT (CLIP's form: 4 layers of 192, 16 patches of 24 x 24 pixels of a picture of 96 x 96) and
LLaVA's projector. `plait.platform.demo.assemble` joins them with the language model to an ordinary
LLaVA checkpoint. The image token is `<file_sep>`, which the language model has and chats never use.

Trained by `examples/training/train_vision.py` in 2,451 steps of 64 pictures that `renders.py`
beside it draws: no data from elsewhere. The language model is not run: the 16 embeddings of a
picture are to be those of the tokens of its caption ("three red circles."), which the projector
holds. So what it can say is what these captions say: 1 to 5 circles, squares, triangles or stars, a
digit, one of 30 words; each in one of 8 colours.

{measured}"""
    )
    (PARTS / "sight" / "README.md").write_text(
        f"""# sight: short answers and JSON about a picture

A LoRA adapter of SmolLM2-135M-Instruct with the tower of `../vision` (rank 8, all linear layers of
the language model, PEFT's format). It is trained by `examples/training/train_adapter.py sight` in
100 steps of 8, in three rounds, on captions in the place where a picture's embeddings stand, with
questions that `tasks/sight.py` makes: no data from elsewhere.

{measured}
It knows pictures of this kind, and no others.
"""
    )


if __name__ == "__main__":
    main()
