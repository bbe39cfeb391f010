"""Tool calls out of growing text, and thinking before them: one reader for whole and streamed.

Takes a reply piece by piece, however it is cut, and tells what each adds. What it tells joins to
the same for every way of cutting. A reply that was cut (by a limit, or at a stop string) ends in
front of a mark that it may have been writing: markup is never content.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.structured.tools.formats import ToolFormat

_LETTERS = string.ascii_letters + string.digits
MakeId = Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """What is added to one call: first its id and name, then arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDelta:
    """What is added to a reply: one of the three."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A whole call. `arguments` is JSON text, as OpenAI has it."""

    id: str
    name: str
    arguments: str = ""


class Reply:
    """What a reply's deltas join to."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []

    def add(self, delta: ReplyDelta) -> None:
        """Append one."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        call = delta.call
        if call is None:
            return
        if call.name is not None:
            self.calls.append(ToolCall(id=call.id or "", name=call.name))
        self.calls[call.index].arguments += call.arguments


def make_id(form: ToolFormat | None) -> str:
    """An id that no other call has; nine characters where a template demands it."""
    short = form is not None and form.short_ids
    letters = "".join(secrets.choice(_LETTERS) for _ in range(9 if short else 24))
    return letters if short else f"call_{letters}"


class ReplyParser:
    """Reads one reply. `form` is None where no tool may be called.

    `thinking`: the reply begins inside of thinking (True), may begin with it (None), or has none.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        *,
        thinking: bool | None = False,
        marks: tuple[str, str] = ("<think>", "</think>"),
        new_id: MakeId | None = None,
    ) -> None:
        self._form = form
        self._new_id = new_id or (lambda: make_id(form))
        self._open, self._close = marks
        self._held = ""  # text that cannot be told yet
        self._state: Callable[[list[ReplyDelta]], bool]
        self._state = {True: self._think, None: self._begin, False: self._body}[thinking]
        self._num_calls = 0
        self._at_start = True  # of the body
        self._trim_left = 0  # line breaks behind thinking that belong to nothing
        self._json = _ObjectEnd()
        self.broken = False  # text that is no call stood where only calls may

    @property
    def num_calls(self) -> int:
        """Calls of which the name is known."""
        return self._num_calls

    @property
    def in_call(self) -> bool:
        """Whether a call has begun that is not complete."""
        return self._state in (self._first_name, self._next_name, self._arguments)

    def feed(self, text: str) -> list[ReplyDelta]:
        """What more text adds."""
        self._held += text
        found: list[ReplyDelta] = []
        while self._state(found):
            pass
        return found

    def end(self, reason: str = "stop", stop: int | str | None = None) -> list[ReplyDelta]:
        """What is left when the reply has ended, for the reasons that its last event gives."""
        held, self._held = self._held, ""
        if not held or self._num_calls:  # markup that was cut behind a call says nothing
            return []
        cut = reason != "stop" or stop is not None
        # A stop string is what the text would have gone on with, unless it is shown already.
        unseen = stop if isinstance(stop, str) and not held.endswith(stop) else ""
        if cut and (self.in_call or self._is_mark(held + unseen)):
            return []
        if self._state == self._think:
            return [ReplyDelta(reasoning=held)]
        return [ReplyDelta(content=held)]

    def _is_mark(self, text: str) -> bool:
        """Whether a text begins with a mark that may stand here, or is the beginning of one."""
        if self._state == self._think:
            marks = [self._close]
        else:
            marks = [self._open] if self._state == self._begin else []
            marks += [] if self._form is None else [self._form.open]
        return any(text.startswith(mark) or mark.startswith(text) for mark in marks)

    # --- states: each takes from `_held`, and says whether there may be more to do ---

    def _begin(self, found: list[ReplyDelta]) -> bool:  # noqa: ARG002
        if self._held.startswith(self._open):
            self._held = self._held[len(self._open) :]
            self._state = self._think
        elif self._open.startswith(self._held):
            return False
        else:
            self._state = self._body
        return True

    def _think(self, found: list[ReplyDelta]) -> bool:
        told, rest = _before(self._held, self._close)
        if told:
            found.append(ReplyDelta(reasoning=told))
        self._held = rest
        if not rest.startswith(self._close):
            return False
        self._held = rest[len(self._close) :]
        self._trim_left = 2
        self._state = self._after_thinking
        return True

    def _after_thinking(self, found: list[ReplyDelta]) -> bool:  # noqa: ARG002
        while self._trim_left and self._held.startswith("\n"):
            self._held = self._held[1:]
            self._trim_left -= 1
        if not self._held and self._trim_left:
            return False
        self._state = self._body
        return True

    def _body(self, found: list[ReplyDelta]) -> bool:
        form = self._form
        if form is None or (form.only_first and not self._at_start):
            told, self._held = self._held, ""
        else:
            told, self._held = _before(self._held, form.open)
            if told and form.only_first:
                told, self._held = told + self._held, ""
        if told:
            self._at_start = False
            found.append(ReplyDelta(content=told))
        if form is None or not self._held.startswith(form.open):
            return False
        self._state = self._first_name
        return True

    def _first_name(self, found: list[ReplyDelta]) -> bool:
        assert self._form is not None
        return self._name(self._form.open + self._form.before_name, found)

    def _next_name(self, found: list[ReplyDelta]) -> bool:
        assert self._form is not None
        return self._name(self._form.between, found)

    def _name(self, before: str, found: list[ReplyDelta]) -> bool:
        """From the markup before a name to its arguments."""
        assert self._form is not None
        if len(self._held) < len(before) and before.startswith(self._held):
            return False
        if not self._held.startswith(before):
            return self._give_up(found)
        name, mark, rest = self._held[len(before) :].partition(self._form.before_arguments)
        if not mark:
            return False if len(name) <= 256 else self._give_up(found)
        call = CallDelta(index=self._num_calls, id=self._new_id(), name=name)
        found.append(ReplyDelta(call=call))
        self._num_calls += 1
        self._held = rest
        self._json = _ObjectEnd()
        self._state = self._arguments
        return True

    def _arguments(self, found: list[ReplyDelta]) -> bool:
        size = self._json.feed(self._held)
        told, self._held = self._held[:size], self._held[size:]
        if told:
            call = CallDelta(index=self._num_calls - 1, arguments=told)
            found.append(ReplyDelta(call=call))
        if not self._json.ended:
            return False
        self._state = self._after_call
        return True

    def _after_call(self, found: list[ReplyDelta]) -> bool:
        """The end of a call's markup."""
        assert self._form is not None
        after = self._form.after_arguments
        if self._held.startswith(after):
            self._held = self._held[len(after) :]
            self._state = self._between
            return True
        return False if after.startswith(self._held) else self._give_up(found)

    def _between(self, found: list[ReplyDelta]) -> bool:  # noqa: ARG002
        form = self._form
        assert form is not None
        if not self._held:
            return False
        if form.between and self._held.startswith(form.between):
            self._state = self._next_name
            return True
        if form.close and self._held.startswith(form.close):
            self._held = self._held[len(form.close) :]
            self._state = self._tail
            return True
        ends = [mark for mark in (form.between, form.close) if mark]
        if any(mark.startswith(self._held) for mark in ends):
            return False
        self._state = self._tail
        return True

    def _tail(self, found: list[ReplyDelta]) -> bool:
        """Behind the last call: nothing, under a grammar."""
        told, self._held = self._held, ""
        if told.strip():
            found.append(ReplyDelta(content=told))
        return False

    def _give_up(self, found: list[ReplyDelta]) -> bool:
        """Markup that no grammar held to the format: it is text."""
        self.broken = True
        self._state = self._tail
        return bool(self._held) and self._tail(found)


def _before(text: str, mark: str) -> tuple[str, str]:
    """Text in front of `mark`, or of what may become it; and the rest."""
    at = text.find(mark)
    if at >= 0:
        return text[:at], text[at:]
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return text[:-size], text[-size:]
    return text, ""


class _ObjectEnd:
    """Finds the end of one JSON object in pieces of text."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.ended = False

    def feed(self, text: str) -> int:
        """How much of `text` belongs to the object."""
        for at, char in enumerate(text):
            if self._in_string:
                self._string(char)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.ended = True
                    return at + 1
        return len(text)

    def _string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
