"""Constraints over HTTP: every word for them, what is refused, and what the engine is given."""

import asyncio
import json

import pytest
from support.fake_engine import FakeEngine
from support.http_app import MESSAGES, Connection, http_client, make_app, sse_events

from plait.platform.core import Event, FinishReason
from plait.platform.errors import BadRequest, GrammarDelayed
from plait.structured.params import StructuredOutputs
from plait.structured.requests import read_constraint
from plait.structured.spec import GrammarKind

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
}


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def shared_engine():
    return FakeEngine()


@pytest.fixture(scope="module")
async def served(shared_engine, anyio_backend):
    """One application for the module: its compile worker takes a second or two to start."""
    app = make_app(shared_engine)
    async with app.router.lifespan_context(app), http_client(app, timeout=60) as client:
        yield client


def body(path, **fields):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    return prompt | fields


WORDS = [
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        GrammarKind.JSON_SCHEMA,
    ),
    ({"response_format": TAG}, GrammarKind.STRUCTURAL_TAG),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarKind.JSON_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.CHOICE),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GrammarKind.GRAMMAR),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, GrammarKind.STRUCTURAL_TAG),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, GrammarKind.JSON_SCHEMA),
    ({"guided_regex": "a+"}, GrammarKind.REGEX),
    ({"guided_choice": ["a"]}, GrammarKind.CHOICE),
    ({"guided_grammar": 'start: "a"'}, GrammarKind.GRAMMAR),
    ({"guided_json_object": True}, GrammarKind.JSON_OBJECT),
    ({"regex": "a"}, GrammarKind.REGEX),
    ({"ebnf": 'root ::= "a"'}, GrammarKind.GRAMMAR),
    ({"json_schema": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA),
    ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA),
    ({"grammar": 'root ::= "a"'}, GrammarKind.GRAMMAR),
    ({"structural_tag": TAG}, GrammarKind.STRUCTURAL_TAG),
]


@pytest.mark.parametrize(("fields", "kind"), WORDS)
def test_every_word_for_a_constraint_is_understood(fields, kind):
    given = {k: v for k, v in fields.items() if k != "guided_decoding_backend"}
    spec = read_constraint(given)
    assert spec is not None
    assert spec.kind is kind
    if kind is GrammarKind.JSON_SCHEMA:
        assert spec.content == SCHEMA
    assert spec.param.startswith(next(iter(given)))


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "kind"), WORDS)
async def test_every_word_reaches_the_engine_as_a_grammar(
    served, shared_engine, path, fields, kind
):
    response = await served.post(path, json=body(path, **fields))
    assert response.status_code == 200, (kind, response.text)
    grammar = shared_engine.requests[-1].grammar
    assert grammar is not None
    assert grammar.payload


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_without_a_constraint_nothing_is_compiled(path):
    engine = FakeEngine()
    app = make_app(engine)
    async with app.router.lifespan_context(app), http_client(app) as client:
        for fields in ({}, {"response_format": {"type": "text"}}, {"guided_json_object": False}):
            response = await client.post(path, json=body(path, **fields))
            assert response.status_code == 200
        assert all(request.grammar is None for request in engine.requests)
        assert app.state.context.grammars.worker_pids == []


def test_whitespace_and_closing_are_options():
    open_schema = {"type": "object", "properties": {"properties": {"type": "string"}}}
    given = {"json": open_schema, "disable_additional_properties": True, "any_whitespace": True}
    spec = read_constraint({"structured_outputs": given})
    assert spec.content == open_schema | {"additionalProperties": False}
    assert spec.options == {"any_whitespace": True}
    spec = read_constraint({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"})
    assert spec.options == {"whitespace_pattern": " ?"}


def test_how_a_schema_is_taken_is_an_option_where_it_is_given():
    given = {"json": SCHEMA, "any_form": False, "assert_formats": True}
    spec = read_constraint({"structured_outputs": given})
    assert spec.options == {"any_form": False, "assert_formats": True}
    assert StructuredOutputs(**given).spec().options.items() >= spec.options.items()
    spec = read_constraint({"structured_outputs": {"json": SCHEMA, "any_form": None}})
    assert spec.options == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "more": 1}}, "response_format.more"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "any_form": 1}}, "structured_outputs.any_form"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"a": 1, "a": 2}'}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": []}, "guided_choice"),
        (
            {"structured_outputs": {"json": {}}, "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
        ),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        *(
            ({"structured_outputs": {**kind, name: value}}, f"structured_outputs.{name}")
            for kind in ({"regex": "a"}, {"choice": ["a"]}, {"grammar": 'start: "a"'})
            for name, value in (
                ("any_form", False),
                ("assert_formats", True),
                ("any_whitespace", True),
                ("whitespace_pattern", " "),
                ("disable_additional_properties", True),
            )
        ),
        (
            {"structured_outputs": {"json_object": True, "any_form": True}},
            "structured_outputs.any_form",
        ),
        (
            {"structured_outputs": {"structural_tag": TAG, "any_whitespace": True}},
            "structured_outputs.any_whitespace",
        ),
    ],
)
def test_what_contradicts_or_is_no_constraint_is_refused_by_name(fields, param):
    with pytest.raises(BadRequest) as refusal:
        read_constraint(fields)
    assert refusal.value.param == param


def test_defaults_that_clients_send_along_are_taken_beside_anything():
    assert StructuredOutputs(regex="a").spec().content == "a"
    sent = {"any_whitespace": False, "whitespace_pattern": None, "any_form": None}
    sent |= {"disable_any_whitespace": False, "disable_additional_properties": False}
    assert read_constraint({"structured_outputs": {"choice": ["a"], **sent}}).content == ["a"]


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        (
            {"guided_json": {"type": "object", "properties": {"a": {"pattern": r"(x)\1"}}}},
            "unsupported_schema_keyword",
            "guided_json",
            "/properties/a/pattern",
        ),
        ({"guided_json": {"type": "strung"}}, "invalid_schema", "guided_json", "strung"),
        ({"guided_regex": "("}, "invalid_regex", "guided_regex", ""),
        ({"guided_grammar": "root ::= ("}, "invalid_grammar", "guided_grammar", ""),
        ({"guided_choice": []}, "invalid_grammar", "guided_choice", "empty"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "("}},
            "invalid_regex",
            "structured_outputs.whitespace_pattern",
            "'whitespace_pattern'",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": 5}},
            "invalid_regex",
            "structured_outputs.whitespace_pattern",
            "regular expression",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": "x"},
            "invalid_regex",
            "guided_whitespace_pattern",
            "spaces",
        ),
        (
            {"guided_json": {"enum": list(range(1001))}},
            "grammar_too_complex",
            "guided_json",
            "1,000",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}},
                }
            },
            None,
            "response_format.json_schema.schema",
            "additionalProperties",
        ),
    ],
)
async def test_what_cannot_be_enforced_is_a_400_that_names_it(served, fields, code, param, words):
    response = await served.post(CHAT, json=body(CHAT, **fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == code or code is None
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(a{0,9}){0,9}"}, "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    ],
)
async def test_a_grammar_that_turns_out_too_dear_in_the_engine_names_its_field_too(
    served, shared_engine, path, fields, param
):
    fault = Event(
        request_id="dear",
        index=0,
        finish_reason=FinishReason.ERROR,
        error=("grammar_too_complex", "slow"),
    )
    shared_engine.fail_after = (1, fault)
    try:
        response = await served.post(path, json=body(path, **fields))
    finally:
        shared_engine.fail_after = None
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "grammar_too_complex"
    assert response.json()["error"]["param"] == param


async def test_a_compile_that_the_machine_did_not_get_to_is_a_503_to_be_retried():
    engine = FakeEngine()
    app = make_app(engine)

    class Late:
        stats = None

        async def compile(self, *_args, **_kwargs):
            raise GrammarDelayed("the grammar is not compiled yet: the machine is busy")

        def close(self):
            pass

    app.state.context.grammars._pool = Late()  # as if it had been started
    async with app.router.lifespan_context(app), http_client(app) as client:
        response = await client.post(CHAT, json=body(CHAT, guided_regex="a"))
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "grammar_compile_delayed"
        assert response.headers["retry-after"] == "1"
        assert "x-should-retry" not in response.headers
        assert app.state.context.admission.in_flight == 0
    assert not engine.requests


async def test_models_without_an_end_token_refuse_constraints_by_name():
    import dataclasses

    engine = FakeEngine()
    model = dataclasses.replace(engine.config.model, eos_token_ids=())
    engine.config = dataclasses.replace(engine.config, model=model)
    app = make_app(engine)
    async with app.router.lifespan_context(app), http_client(app) as client:
        response = await client.post(CHAT, json=body(CHAT, guided_regex="a"))
        assert response.status_code == 400
        assert "end token" in response.json()["error"]["message"]
        assert (await client.post(CHAT, json=body(CHAT))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_streamed_and_whole_answers_are_the_same(served, shared_engine, stream):
    shared_engine.reply = lambda _request, _index: '{"a":1}'
    fields = {"response_format": {"type": "json_object"}, "stream": stream, "n": 2}
    response = await served.post(CHAT, json=body(CHAT, **fields))
    if not stream:
        assert [c["message"]["content"] for c in response.json()["choices"]] == ['{"a":1}'] * 2
        return
    texts = ["", ""]
    for event in sse_events(response.content)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ['{"a":1}'] * 2


async def test_a_note_of_the_grammar_comes_with_the_answer(served):
    schema = SCHEMA | {"minimun": 1}
    response = await served.post(CHAT, json=body(CHAT, guided_json=schema))
    assert "minimun" in response.json()["warnings"][0]
    response = await served.post(CHAT, json=body(CHAT, guided_json=schema, stream=True))
    warned = [e for e in sse_events(response.content)[:-1] if e.get("warnings")]
    assert len(warned) == 1


async def test_a_client_that_goes_away_while_its_grammar_compiles_holds_no_place():
    """And one whose deadline passes gets its 408."""
    engine = FakeEngine()
    app = make_app(engine)
    context = app.state.context
    began = asyncio.Event()

    async def never(*_args, **_kwargs):
        began.set()
        await asyncio.Event().wait()

    class Slow:
        compile = staticmethod(never)
        stats = None

        def close(self):
            pass

    context.grammars._pool = Slow()  # as if it had been started
    async with app.router.lifespan_context(app), http_client(app) as client:
        async with Connection(app, CHAT, body(CHAT, guided_regex="a")) as connection:
            await asyncio.wait_for(began.wait(), 5)
            assert context.admission.in_flight == 1
            assert (await client.post(CHAT, json=body(CHAT))).status_code == 200  # others go on
            connection.hang_up()
            await connection.ended()
        assert context.admission.in_flight == 0
        late = await client.post(CHAT, json=body(CHAT, guided_regex="a", timeout=0.05))
        assert late.status_code == 408
        assert [request.grammar for request in engine.requests] == [None]


async def test_compiles_are_counted(served):
    text = (await served.get("/metrics")).text
    assert 'plait:grammar_compiles_total{outcome="compiled"}' in text
    assert 'plait:grammar_cache_hits_total{level="memory"}' in text
    assert "plait:mask_rows_total" in text
