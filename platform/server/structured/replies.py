"""What a request wants of its reply, and the reply read back into content, thinking and calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.platform.server.responses import Delta, FunctionJson, ToolCallDelta, ToolCallJson
from plait.structured.requests import FIELDS, read_constraint
from plait.structured.tools.parser import CallDelta, Reply, ReplyDelta, ReplyParser

if TYPE_CHECKING:
    from plait.platform.core import Event
    from plait.platform.server.schemas import Constraint
    from plait.structured.spec import GrammarSpec


def constraint_of(body: Constraint) -> GrammarSpec | None:
    """The constraint among a request's fields. Raises `BadRequest`."""
    return read_constraint({name: getattr(body, name) for name in FIELDS & body.model_fields_set})


class Reading:
    """One answer as it is read."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self.reply = Reply()

    def take(self, event: Event) -> list[Delta]:
        """What an event adds, as a client sees it."""
        found = self._parser.feed(event.text)
        if event.finish_reason is not None:
            found += self._parser.end(event.finish_reason, event.stop_reason)
        for delta in found:
            self.reply.add(delta)
        return [_delta(each) for each in found]

    def finish_reason(self, reason: str | None) -> str | None:
        """Calls that are complete end a reply for a reason of their own."""
        called = bool(self.reply.calls) and reason == "stop" and not self._parser.in_call
        return "tool_calls" if called else reason

    @property
    def calls(self) -> list[ToolCallJson]:
        """All calls so far."""
        return [
            ToolCallJson(
                id=call.id, function=FunctionJson(name=call.name, arguments=call.arguments)
            )
            for call in self.reply.calls
        ]


def _delta(added: ReplyDelta) -> Delta:
    if added.call is not None:
        return Delta(tool_calls=[_call(added.call)])
    return Delta(content=added.content or None, reasoning_content=added.reasoning or None)


def _call(added: CallDelta) -> ToolCallDelta:
    function = FunctionJson(name=added.name, arguments=added.arguments)
    kind = None if added.id is None else "function"
    return ToolCallDelta(index=added.index, id=added.id, type=kind, function=function)
