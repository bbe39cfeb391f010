"""The REPL, scripted over a fake that answers."""

import io
from collections.abc import Iterator

import pytest

from plait.platform.cli.answering import Pace, Piece
from plait.platform.cli.chat import Repl
from plait.platform.core import SamplingParams
from plait.platform.errors import ContextLengthExceeded


class FakeAnswerer:
    """Answers with the last question's words in capitals; notes what it was asked."""

    name = "fake"

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.num_closed = 0

    def chat(self, messages, params) -> Iterator[Piece]:
        self.asked.append([dict(m) for m in messages])
        question = messages[-1]["content"]
        try:
            for number, word in enumerate(question.split(), 1):
                if word == "ctrl-c":
                    raise KeyboardInterrupt
                if word == "too-long":
                    raise ContextLengthExceeded("too long for me")
                yield Piece(text=word.upper() + " ", num_prompt_tokens=7, num_output_tokens=number)
            yield Piece(finish_reason="stop")
        finally:
            self.num_closed += 1


def script(*lines):
    """A `read_line` that says these lines, then ends; an exception in place of a line is raised."""
    waiting = list(lines)

    def read() -> str:
        if not waiting:
            raise EOFError
        line = waiting.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    return read


@pytest.fixture
def talk():
    def run(*lines, system=None):
        answerer, out, notes = FakeAnswerer(), io.StringIO(), io.StringIO()
        repl = Repl(answerer, SamplingParams(), system=system, out=out, notes=notes)
        repl.run(script(*lines))
        return answerer, out.getvalue(), notes.getvalue()

    return run


def test_answers_stream_and_the_history_is_kept(talk):
    answerer, out, notes = talk("hello there\n", "", "again")
    assert out == "HELLO THERE \nAGAIN \n"
    assert answerer.asked[1] == [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "HELLO THERE "},
        {"role": "user", "content": "again"},
    ]
    assert "TTFT" in notes
    assert "7 prompt + 2 answer tokens · stop" in notes


def test_reset_forgets_the_turns_and_keeps_the_system_message(talk):
    answerer, _, _ = talk("one", "/reset", "two", system="be brief")
    assert answerer.asked[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "two"},
    ]


def test_system_sets_and_shows(talk):
    answerer, _, notes = talk("/system", "/system speak of rivers", "/system", "hi")
    assert "(system: none)" in notes
    assert "(system: speak of rivers)" in notes
    assert answerer.asked[0][0] == {"role": "system", "content": "speak of rivers"}


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(talk):
    answerer, out, notes = talk("a b ctrl-c d", "next")
    assert out == "A B \nNEXT \n"
    assert "interrupted" in notes
    assert answerer.asked[1][1] == {"role": "assistant", "content": "A B "}
    assert answerer.num_closed == 2


def test_ctrl_c_at_the_prompt_does_not_leave(talk):
    _, out, notes = talk(KeyboardInterrupt(), "hi")
    assert out == "HI \n"
    assert "/quit" in notes


def test_a_refused_question_is_shown_and_forgotten(talk):
    answerer, out, notes = talk("too-long", "hi")
    assert out == "HI \n"
    assert "error: too long for me" in notes
    assert answerer.asked[1] == [{"role": "user", "content": "hi"}]


def test_quit_leaves_at_once(talk):
    answerer, _, _ = talk("/quit", "hi")
    assert answerer.asked == []


def test_stats_add_up(talk):
    _, _, notes = talk("a b", "c", "/stats")
    assert "2 answers · 14 prompt + 3 answer tokens" in notes


def test_an_unknown_command_says_so_and_asks_nobody(talk):
    answerer, _, notes = talk("/hepl")
    assert "/hepl is no command" in notes
    assert answerer.asked == []


def test_the_pace_counts_tokens_after_the_first():
    pace = Pace(start_s=0.0)
    pace.first_s, pace.last_s, pace.num_output_tokens = 0.5, 2.5, 5
    assert pace.ttft_s == 0.5
    assert pace.rate == 2.0
    pace.num_output_tokens = 1
    assert pace.rate is None
