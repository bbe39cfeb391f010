"""`plait chat`: talk to a model in the terminal, in this process or over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import TextIO

from plait.platform.cli.answering import Answerer, Message, Pace
from plait.platform.cli.sources import Resolved
from plait.platform.cli.values import piped
from plait.platform.core import SamplingParams
from plait.platform.errors import PlaitError

HELP = """\
/help           this list
/reset          forget the conversation, keep the system message
/system [TEXT]  show or set the system message
/stats          tokens and speed since the start
/quit           leave (so does Ctrl-D)
Ctrl-C stops an answer."""


def chat(*, flags: Resolved) -> None:
    """Talk to MODEL in the terminal (without --url: in this process, no server needed)."""
    from plait.platform.cli.asking import open_answerer, sampling_params

    params = sampling_params(flags)
    with closing(open_answerer(flags)) as answerer:
        repl = Repl(answerer, params, system=flags["system"], out=sys.stdout, notes=sys.stderr)
        if _is_terminal():
            repl.note(f"{answerer.name} · /help for commands, Ctrl-D to leave")
        repl.run(_terminal_line if _is_terminal() else _piped_line)


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _terminal_line() -> str:
    import readline  # noqa: F401 (input() gains editing and history by it)

    return input("> ")


def _piped_line() -> str:
    line = piped(lambda stdin: stdin.readline())
    if not line:
        raise EOFError
    return line


@dataclass(slots=True)
class Totals:
    """What `/stats` shows."""

    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    seconds: float = 0.0

    def add(self, pace: Pace) -> None:
        """Count one answer."""
        self.num_answers += 1
        self.num_prompt_tokens += pace.num_prompt_tokens
        self.num_output_tokens += pace.num_output_tokens
        self.seconds += max(0.0, pace.last_s - pace.start_s)

    def __str__(self) -> str:
        return (
            f"{self.num_answers} answers · {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} answer tokens · {self.seconds:.1f} s of answering"
        )


@dataclass(slots=True, kw_only=True)
class _History:
    system: str | None
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns


class Repl:
    """The loop: reads lines, streams answers to `out`, everything else to `notes`."""

    def __init__(
        self,
        answerer: Answerer,
        params: SamplingParams,
        *,
        system: str | None = None,
        out: TextIO,
        notes: TextIO,
    ) -> None:
        self._answerer = answerer
        self._params = params
        self._history = _History(system=system)
        self._totals = Totals()
        self._out = out
        self._notes = notes

    def run(self, read_line: Callable[[], str]) -> None:
        """Until `read_line` raises `EOFError`, or /quit."""
        while True:
            try:
                line = read_line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self.note("\n(/quit or Ctrl-D leaves)")
                continue
            if line.startswith("/"):
                if not self._command(*line.split(maxsplit=1)):
                    return
            elif line:
                self._answer(line)

    def note(self, text: str) -> None:
        """Say something that is not the model's."""
        print(text, file=self._notes, flush=True)

    def _command(self, name: str, argument: str = "") -> bool:
        """Obey a slash command; false to leave."""
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                self.note(HELP)
            case "/reset":
                self._history.turns.clear()
                self.note("(conversation forgotten)")
            case "/stats":
                self.note(str(self._totals))
            case "/system":
                self._history.system = argument or self._history.system
                self.note(f"(system: {self._history.system or 'none'})")
            case _:
                self.note(f"{name} is no command; /help lists them")
        return True

    def _answer(self, question: str) -> None:
        turns = self._history.turns
        turns.append({"role": "user", "content": question})
        pace, text = Pace.begin(), ""
        try:
            with closing(self._answerer.chat(self._history.messages(), self._params)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    pace.add(piece)
                    text += piece.text
                    self._out.write(piece.text)
                    self._out.flush()
        except KeyboardInterrupt:
            pace.finish_reason = "interrupted"
        except PlaitError as error:
            # The question would fail again with every later one: it does not stay.
            turns.pop()
            self.note(f"\nerror: {error.message}")
            return
        self._out.write("\n")
        self._out.flush()
        turns.append({"role": "assistant", "content": text})
        self._totals.add(pace)
        self.note(f"[{pace}]")
