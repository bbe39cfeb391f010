"""Reading replies: content, thinking and calls, however the text comes in pieces."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_calls import ARGUMENTS, CALL, MISTRAL, WEATHER_CALL

from plait.structured.tools import formats
from plait.structured.tools.parser import Reply, ReplyParser


def read(form, pieces, thinking=False, ended=("stop", None)):
    ids = map("call_{}".format, itertools.count())
    parser = ReplyParser(form, thinking=thinking, new_id=lambda: next(ids))
    reply, deltas = Reply(), []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.end(*ended)
    for delta in deltas:
        reply.add(delta)
    return reply, deltas


def seen(reply):
    calls = [(call.id, call.name, call.arguments) for call in reply.calls]
    return reply.content, reply.reasoning, calls


LLAMA = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
REPLIES = [
    (formats.HERMES, False, f"Let me <b>see</b>. {CALL}\n{CALL}"),
    (formats.HERMES, False, "No <tool_ call {} at all <"),
    (formats.HERMES, True, f"I think <tool_call> so</think>\n\n{CALL}"),
    (formats.HERMES, None, f"<think>hm</think>\n\nWell. {CALL}"),
    (formats.HERMES, None, f"<thin {CALL}"),
    (formats.HERMES, False, CALL[:-14]),
    (formats.HERMES, False, CALL[:20]),
    (formats.HERMES, False, f"{CALL}\n{CALL[:25]}"),
    (formats.LLAMA, False, LLAMA),
    (formats.LLAMA, False, f"As text: {LLAMA}"),
    (formats.MISTRAL, False, f"Hi[TOOL_CALLS][{MISTRAL}, {MISTRAL}]"),
    (
        formats.MISTRAL_ARGS,
        False,
        f"[TOOL_CALLS]clock[ARGS]{{}}[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    ),
    (None, True, "thinking</thi</think>\n{}"),
]


@pytest.mark.parametrize(("form", "thinking", "text"), REPLIES)
def test_replies_read_the_same_however_they_are_cut(form, thinking, text):
    whole = seen(read(form, [text], thinking)[0])
    for at in range(len(text) + 1):
        assert seen(read(form, [text[:at], text[at:]], thinking)[0]) == whole
    assert seen(read(form, text, thinking)[0]) == whole


@given(st.sampled_from(REPLIES), st.lists(st.integers(1, 9), min_size=1, max_size=40))
@settings(deadline=None, max_examples=150)
def test_replies_in_random_pieces_keep_the_contract_of_deltas(case, sizes):
    form, thinking, text = case
    pieces, rest = [], text
    for size in itertools.cycle(sizes):
        if not rest:
            break
        pieces.append(rest[:size])
        rest = rest[size:]
    reply, deltas = read(form, pieces, thinking)
    assert seen(reply) == seen(read(form, [text], thinking)[0])
    calls = [delta.call for delta in deltas if delta.call is not None]
    for index in range(len(reply.calls)):
        own = [call for call in calls if call.index == index]
        assert own[0].id is not None
        assert own[0].name is not None
        assert all(call.id is None and call.name is None for call in own[1:])
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    kinds = [bool(d.content) + bool(d.reasoning) + (d.call is not None) for d in deltas]
    assert kinds == [1] * len(kinds)


def test_each_format_gives_its_content_thinking_and_calls():
    found = [
        (content, reasoning, [call[1:] for call in calls])
        for content, reasoning, calls in (seen(read(f, [t], k)[0]) for f, k, t in REPLIES)
    ]
    assert found == [
        ("Let me <b>see</b>. ", "", [WEATHER_CALL] * 2),
        ("No <tool_ call {} at all <", "", []),
        ("", "I think <tool_call> so", [WEATHER_CALL]),
        ("Well. ", "hm", [WEATHER_CALL]),
        ("<thin ", "", [WEATHER_CALL]),
        ("", "", [WEATHER_CALL]),
        (CALL[:20], "", []),
        ("", "", [WEATHER_CALL]),
        ("", "", [WEATHER_CALL]),
        (f"As text: {LLAMA}", "", []),
        ("Hi", "", [WEATHER_CALL] * 2),
        ("", "", [("clock", "{}"), WEATHER_CALL]),
        ("{}", "thinking</thi", []),
    ]


@pytest.mark.parametrize("form", [*{form.name: form for form, _, _ in REPLIES if form}.values()])
def test_a_reply_cut_anywhere_shows_no_markup(form):
    """Content is that of the whole reply, or a beginning of it, however the pieces come."""
    for own, thinking, text in REPLIES:
        if own is not form or thinking is not False:
            continue
        content = seen(read(form, [text])[0])[0]
        if content == CALL[:20]:  # as text, only where it has ended by itself
            content = ""
        for at in range(len(text) + 1):
            whole = seen(read(form, [text[:at]], ended=("length", None))[0])
            assert content.startswith(whole[0])
            assert seen(read(form, text[:at], ended=("length", None))[0]) == whole
            if at < len(content):
                assert form.open.startswith(content[len(whole[0]) : at])


@pytest.mark.parametrize(
    ("text", "thinking", "ended", "content", "reasoning"),
    [
        (CALL[:20], False, ("length", None), "", ""),
        ("a <tool", False, ("length", None), "a ", ""),
        ("a <tool", False, ("stop", None), "a <tool", ""),
        ("a <tool", False, ("stop", 7), "a ", ""),
        ("a <tool_", False, ("stop", "call"), "a ", ""),
        ("a <tool_call", False, ("stop", "call"), "a ", ""),
        ("a <", False, ("stop", "b>"), "a <", ""),
        ("a <", False, ("stop", "th"), "a <", ""),
        ("<", None, ("stop", "th"), "", ""),
        ("<thi", None, ("length", None), "", ""),
        ("hm</th", True, ("length", None), "", "hm"),
        ("hm<tool", True, ("length", None), "", "hm<tool"),
    ],
)
def test_what_may_be_a_mark_is_text_only_where_it_cannot_go_on(
    text, thinking, ended, content, reasoning
):
    found = seen(read(formats.HERMES, text, thinking, ended)[0])
    assert found == (content, reasoning, [])


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("{% for t in tools %}<tools>{% endfor %}<tool_call>{}</tool_call>", formats.HERMES),
        ('<|start_header_id|>{"name": n, "parameters": p} {{ tools }}', formats.LLAMA),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", formats.MISTRAL),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", formats.MISTRAL_ARGS),
        ("{{ tools }}<tool_call><function=name>", None),
        ("{{ messages }}", None),
    ],
)
def test_formats_are_known_by_the_template(text, form):
    assert formats.detect(text) is form
