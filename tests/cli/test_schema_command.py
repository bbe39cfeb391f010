"""`plait schema check`: findings, exit codes, JSON."""

import json
import subprocess
import sys

import pytest
from support.tiny_models import make_checkpoint
from typer.testing import CliRunner

from plait.platform.cli.main import app
from plait.platform.errors import GrammarTooComplex
from plait.structured.pool import CompilePool
from plait.structured.spec import GrammarKind

runner = CliRunner()
OPEN = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}


@pytest.fixture
def check(tmp_path):
    def run(schema, *flags, compiles=False):
        file = tmp_path / "schema.json"
        file.write_text(schema if isinstance(schema, str) else json.dumps(schema))
        if not compiles:
            flags = (*flags, "--no-compile")
        return runner.invoke(app, ["schema", "check", str(file), *flags])

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("model")))


def test_it_is_compiled_as_a_server_would(check, model):
    data = json.loads(check(OPEN, "--json", "--model", model, compiles=True).output)
    assert data["error"] is None
    assert data["compiled"]["bytes"] > 0
    assert data["compiled"]["seconds"] > 0
    result = check(OPEN, "--model", model, compiles=True)
    assert result.exit_code == 0
    assert "compiled in" in result.output


def test_what_is_too_dear_to_compile_is_refused_as_by_a_server(check, model, monkeypatch):
    def refuses(self, spec):
        if spec.kind is GrammarKind.JSON_SCHEMA:
            raise GrammarTooComplex("the grammar is too complex: compiling takes more than 2 s")

    monkeypatch.setattr(CompilePool, "compile_blocking", refuses)
    result = check(OPEN, "--json", "--model", model, compiles=True)
    assert result.exit_code == 1
    data = json.loads(result.output)
    assert data["error"].startswith("the grammar is too complex")
    assert data["backend"] == "llguidance"
    shown = check(OPEN, "--model", model, compiles=True)
    assert "refused: the grammar is too complex" in shown.output


def test_each_keyword_is_shown_with_its_backend(check):
    result = check(OPEN)
    assert result.exit_code == 0, result.output
    assert "llguidance   /properties/a/maxLength  (xgrammar: not exact)" in result.output
    assert "enforced by llguidance" in result.output


def test_a_refused_keyword_is_named_and_the_exit_code_is_1(check):
    result = check({"type": "string", "format": "idn-email"}, "--json")
    assert result.exit_code == 1
    data = json.loads(result.output)
    assert data["backend"] is None
    assert "'format' at /format" in data["error"]
    assert {each["pointer"]: each["backend"] for each in data["keywords"]}["/format"] is None


def test_strict_demands_closed_objects(check):
    listed = {**OPEN, "required": ["a"]}
    assert check({**listed, "additionalProperties": False}, "--strict").exit_code == 0
    result = check(listed, "--strict")
    assert result.exit_code == 1
    assert "additionalProperties" in result.output


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("{", 2, "schema.json"),
        ('{"type": "null", "type": "string"}', 2, "the key 'type' stands twice"),
        ('{"type": "strng"}', 1, "there is no type 'strng'"),
    ],
)
def test_what_is_no_schema_is_said_in_one_line(check, text, code, words):
    result = check(text)
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from plait.platform.cli.main import app\n"
        "try: app(['schema', 'check', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'xgrammar', 'llguidance'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_draft_leaves_open_is_said_and_can_be_chosen(check):
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"n": {"type": "integer"}, "m": {"type": "string", "format": "email"}},
        "additionalProperties": False,
        "required": ["n", "m"],
    }
    result = check(schema)
    assert "nothing      /properties/m/format  (an annotation here)" in result.output
    assert "note         'format' asserts nothing in the draft" in result.output
    assert "enforced by llguidance, in any form" in result.output
    for flags in (["--strict"], ["--one-form", "--assert-formats"]):
        data = json.loads(check(schema, "--json", *flags).output)
        assert not data["any_form"]
        assert all(each["asserts"] for each in data["keywords"])
    schema.pop("$schema")
    data = json.loads(check(schema, "--json", "--any-form", "--annotate-formats").output)
    assert data["any_form"]
    assert [each["pointer"] for each in data["keywords"] if not each["asserts"]] == [
        "/properties/m/format"
    ]
