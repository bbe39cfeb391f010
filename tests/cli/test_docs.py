"""The documentation names what there is: every flag, field and error, and no link leads nowhere."""

import ast
import re
from pathlib import Path

import pytest

from plait.platform import errors
from plait.platform.cli import table
from plait.platform.server import errors as server_errors  # its subclasses count too
from plait.platform.server.fields import REFUSED
from plait.platform.server.schemas import ChatCompletionRequest, CompletionRequest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_every_setting_of_serve_is_in_the_guide():
    text = read("docs/serving.md")
    for flag in table.SERVE:
        if not flag.argument:
            assert re.search(rf"\| `--(no-)?{flag.spelling}` \|", text), flag.spelling


def test_the_guide_names_no_setting_that_does_not_exist():
    names = {flag.spelling for flag in table.KNOWN} | {"config", "debug", "help", "no-deps"}
    names |= {alias for flag in table.KNOWN for alias in flag.aliases}
    names |= {"model", "name", "no-name", "stream", "stats", "chats", "compile", "version"}
    found = {
        name for doc in DOCS for name in re.findall(r"`[^`\n]*?--([a-z][a-z-]+)", doc.read_text())
    }
    assert {name.removeprefix("no-") for name in found} <= names | {"deps"}


def test_every_request_field_is_in_the_api_page():
    text = read("docs/api.md")
    for schema in (ChatCompletionRequest, CompletionRequest):
        for name in schema.model_fields:
            known = re.search(rf"\b{name}\b", text) is not None
            assert known or name in ("prompt", "use_beam_search"), name
    assert "chat_template" in REFUSED


def test_every_error_code_is_explained():
    classes, codes = [errors.PlaitError], set()
    while classes:
        cls = classes.pop()
        classes.extend(cls.__subclasses__())
        codes.add(cls.code)
    assert server_errors.Aborted.code in codes
    # Of the command line alone: its last line says it in words.
    codes -= {"invalid_config", "model_unsupported"}
    page = read("docs/api.md")
    for code in codes:
        assert f"`{code}`" in page, code


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(doc):
    for target in re.findall(r"\]\(([^)#]*)[^)]*\)", doc.read_text("utf-8")):
        if target and "://" not in target:
            assert (doc.parent / target).exists(), target


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_python_shown_is_python(doc):
    for block in re.findall(r"```python\n(.*?)```", doc.read_text("utf-8"), flags=re.DOTALL):
        ast.parse(block)


def test_every_example_says_how_to_run_it_and_what_it_prints():
    examples = sorted((ROOT / "examples").iterdir())
    assert examples
    for path in examples:
        if path.is_file():
            head = path.read_text("utf-8")[:600]
            assert path.name in head, path.name
            assert "Prints" in head, path.name
