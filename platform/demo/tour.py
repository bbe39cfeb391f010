"""A tour of the default model: what one engine does, shown and checked, in a few seconds.

Each stop asks the engine of one `LLM` and says what came. It holds where what Plait guarantees came
out: answers of the form that was asked for, and the same text with drafts as without. What so small
a model makes of a question is shown, and no reason to fail.
"""

from __future__ import annotations

import json
import operator
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from plait.platform.core import SamplingParams, Speculation
from plait.platform.demo.questions import (
    CHATS,
    COPY,
    DESCRIBE,
    FIELDS,
    LOOK,
    PICTURE,
    blunt,
    message,
    query,
    squares,
)
from plait.structured.params import StructuredOutputs

if TYPE_CHECKING:
    from plait.platform.messages import Stats
    from plait.platform.offline.llm import LLM
    from plait.platform.offline.outputs import RequestOutput

_GREEDY = SamplingParams(temperature=0, max_tokens=96)
_NUM_ROUNDS = 4  # of one request of each kind
_NO_DRAFTS = Speculation(enabled=False)


class Voice(Protocol):
    """Who tells what is seen."""

    def stop(self, title: str, why: str) -> None:
        """A stop of the tour begins."""

    def said(self, who: str, text: str) -> None:
        """An answer, or a figure."""

    def held(self, what: str, *, true: bool) -> None:
        """What was checked."""


def run(llm: LLM, voice: Voice) -> bool:
    """Make all stops; whether everything held that must."""
    tour = _Tour(llm, voice)
    for title, why, stop in (
        ("Adapters", "one base, three tasks, all in one batch", tour.adapters),
        ("A picture", "read by a vision tower, asked through an adapter", tour.picture),
        ("A form", "JSON of a schema, and nothing else", tour.form),
        ("Drafts", "many tokens a step, the same text", tour.drafts),
        ("All four in one request", "picture, adapter, schema, drafts", tour.together),
        ("All kinds at once", "in the same steps", tour.mixed),
    ):
        voice.stop(title, why)
        stop()
    return tour.all_held


@dataclass(slots=True)
class _Tour:
    llm: LLM
    voice: Voice
    all_held: bool = True

    def adapters(self) -> None:
        names = [None, "fields", "sql", "tone"]
        chats = [_chat(text) for text in (blunt(), message(), query(), blunt())]
        outputs = self._ask(chats, adapter=names)
        for name, output in zip(names, outputs, strict=True):
            self.voice.said(name or "base", output.outputs[0].text)

    def picture(self) -> None:
        self.voice.said("asked", f"{LOOK} (It shows three red squares.)")
        (output,) = self._ask([_look(3, "red")], adapter="sight")
        self.voice.said("sight", output.outputs[0].text)

    def form(self) -> None:
        wish = StructuredOutputs(json=FIELDS)
        outputs = self._ask(
            [_chat(message())] * 2, adapter=[None, "fields"], structured_outputs=wish
        )
        for name, output in zip(("base", "fields"), outputs, strict=True):
            self.voice.said(name, output.outputs[0].text)
        self._check("both answers have the form", all(_has_form(o, FIELDS) for o in outputs))

    def drafts(self) -> None:
        chat = [_chat(COPY)]
        self._ask(chat, speculation=_NO_DRAFTS)  # so that both find the prompt computed
        plain, plain_steps, plain_s = self._timed(chat, speculation=_NO_DRAFTS)
        drafted, steps, seconds = self._timed(chat)
        tokens = len(plain.outputs[0].token_ids)
        self.voice.said(
            "without", f"{tokens} tokens, {plain_steps} steps, {tokens / plain_s:.0f} tok/s"
        )
        self.voice.said("with", f"{tokens} tokens, {steps} steps, {tokens / seconds:.0f} tok/s")
        self.voice.said("accepted", _drafts(drafted.outputs[0].drafts))
        same = plain.outputs[0].token_ids == drafted.outputs[0].token_ids
        self._check("both texts are the same", same)

    def together(self) -> None:
        wish = StructuredOutputs(json=PICTURE)
        (output,) = self._ask(
            [_look(2, "blue", DESCRIBE)], adapter="sight", structured_outputs=wish
        )
        answer = output.outputs[0]
        self.voice.said("sight", answer.text)
        self.voice.said("drafts", _drafts(answer.drafts))
        self._check("the answer has the form", _has_form(output, PICTURE))

    def mixed(self) -> None:
        kinds = [kind for number in range(_NUM_ROUNDS) for kind in _round(number)]
        chats, adapters, schemas = zip(*kinds, strict=True)
        wishes = [None if s is None else StructuredOutputs(json=s) for s in schemas]
        before, began = self.llm.stats, time.perf_counter()
        outputs = self._ask(list(chats), adapter=list(adapters), structured_outputs=wishes)
        seconds, stats = time.perf_counter() - began, self.llm.stats
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        steps = stats.num_steps - before.num_steps
        self.voice.said(
            "all",
            f"{len(kinds)} requests, {tokens} tokens in {seconds:.1f} s: "
            f"{tokens / seconds:.0f} tok/s, {steps} steps",
        )
        for name, text in _rows(before, stats):
            self.voice.said(name, text)
        forms = [(o, s) for o, s in zip(outputs, schemas, strict=True) if s is not None]
        self._check("every answer has its form", all(_has_form(o, s) for o, s in forms))

    def _ask(self, chats: list[Any], **more: Any) -> list[RequestOutput]:
        outputs = self.llm.chat(chats, _GREEDY, progress=False, **more)
        failed = [output.outputs[0] for output in outputs if output.outputs[0].error]
        if failed:
            self._check(f"no request fails: {failed[0].error}", False)
        return outputs

    def _timed(self, chats: list[Any], **more: Any) -> tuple[RequestOutput, int, float]:
        steps, began = self.llm.stats.num_steps, time.perf_counter()
        (output,) = self._ask(chats, **more)
        return output, self.llm.stats.num_steps - steps, time.perf_counter() - began

    def _check(self, what: str, true: bool) -> None:
        self.all_held &= true
        self.voice.held(what, true=true)


def _chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _look(count: int, colour: str, text: str = LOOK) -> list[dict[str, Any]]:
    picture = {"type": "image", "image": squares(count, colour)}
    return [{"role": "user", "content": [{"type": "text", "text": text}, picture]}]


def _round(number: int) -> list[tuple[list[dict[str, Any]], str | None, dict[str, Any] | None]]:
    """One request of each kind: a chat, its adapter, its schema."""
    return [
        (_chat(CHATS[number]), None, None),
        (_chat(blunt(number)), "tone", None),
        (_chat(query(number)), "sql", None),
        (_chat(message(number)), "fields", FIELDS),
        (_look(1 + number, "green"), "sight", None),
        (_look(1 + number, "blue", DESCRIBE), "sight", PICTURE),
    ]


def _has_form(output: RequestOutput, schema: dict[str, Any]) -> bool:
    """Whether an answer is the whole of such an object; the schemas have no more in them."""
    try:
        found = json.loads(output.outputs[0].text)
    except ValueError:
        return False
    return isinstance(found, dict) and set(found) == set(schema["properties"])


def _drafts(drafts: dict[str, tuple[int, int]]) -> str:
    counts = [f"{held} of {tried} from {source}" for source, (tried, held) in drafts.items()]
    return ", ".join(counts) or "none was worth it"


def _rows(before: Stats, after: Stats) -> list[tuple[str, str]]:
    """What the rows of the steps between two moments were."""
    drafted = {
        source: tuple(map(operator.sub, counts, before.drafts.get(source, (0, 0))))
        for source, counts in after.drafts.items()
    }
    num_drafts = sum(tried for tried, _ in drafted.values())
    return [
        ("rows", f"{after.adapter_rows - before.adapter_rows} with an adapter"),
        ("", f"{after.image_rows - before.image_rows} of pictures"),
        ("", f"{after.mask_rows - before.mask_rows} under a grammar"),
        ("", f"{num_drafts} of drafts; accepted {_drafts(drafted)}"),
    ]
