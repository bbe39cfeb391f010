"""Adapters on the command line: what to load at start, key files, and `plait adapters`."""

import json
import os

import httpx
import pytest
from typer.testing import CliRunner

from plait.platform.cli import table
from plait.platform.cli.main import app
from plait.platform.cli.settings import server_settings
from plait.platform.cli.sources import resolve
from plait.platform.cli.values import parse_adapter
from plait.platform.errors import ConfigError
from plait.platform.server.access import Grant
from plait.platform.server.settings import NamedSource

runner = CliRunner()


def settings(given=None, environ=None, file=None):
    flags = resolve(table.SERVE, table.KNOWN, given=given or {}, environ=environ or {}, file=file)
    return server_settings(flags)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith("PLAIT_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "text",
    [
        "sql=a,b/c=d",
        '{"name": "sql", "path": "a,b/c=d"}',
        '{"name": "sql", "path": "a,b/c=d", "base_model_name": "x"}',
    ],
)
def test_an_adapter_is_named_in_either_form(text):
    assert parse_adapter(text) == NamedSource(name="sql", source="a,b/c=d")
    assert settings({"adapters": [text]}).adapters == (parse_adapter(text),)


@pytest.mark.parametrize(
    "text", ["sql", "=x", "sql=", '{"name": "sql"}', '{"name": 1, "path": "x"}']
)
def test_what_names_no_adapter_is_refused(text):
    with pytest.raises(ConfigError, match="--adapters wants name=path"):
        settings({"adapters": [text]})


def test_adapters_come_from_variables_and_files_too(tmp_path):
    file = tmp_path / "plait.yaml"
    file.write_text("adapters: [a=x, b=y]\nadmin-key: boss\n")
    both = (NamedSource(name="a", source="x"), NamedSource(name="b", source="y"))
    assert settings(file=file).adapters == both
    assert settings(file=file).admin_key == "boss"
    assert settings(environ={"PLAIT_ADAPTERS": "a=x,b=y"}).adapters == both
    assert "boss" not in repr(settings(file=file))


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "a", "path": "x,1"}, {"name": "b", "path": "y"}]',
        ' [{"name": "a", "path": "x,1"}, "b=y"]',
    ],
)
def test_vllms_json_list_is_read_from_a_variable_and_a_flag(text):
    both = (NamedSource(name="a", source="x,1"), NamedSource(name="b", source="y"))
    assert settings(environ={"PLAIT_ADAPTERS": text}).adapters == both
    assert settings({"adapters": [text]}).adapters == both
    one = settings(environ={"PLAIT_ADAPTERS": '{"name": "a", "path": "x,1"}'})
    assert one.adapters == both[:1]


@pytest.mark.parametrize("text", ['[{"name": "a"}]', "[1]", '[{"name": "a", "path": "x"}'])
def test_a_variable_that_names_no_adapters_is_refused(text):
    with pytest.raises(ConfigError, match="PLAIT_ADAPTERS wants name=path"):
        settings(environ={"PLAIT_ADAPTERS": text})


@pytest.mark.parametrize("model", [[], ["model"]])
@pytest.mark.parametrize(
    ("flag", "second"), [("--adapters", "b=y"), ("--lora-modules", '{"name": "b", "path": "y"}')]
)
def test_several_adapters_behind_one_flag_are_told_to_repeat_it(model, flag, second):
    done = runner.invoke(app, ["serve", *model, flag, "a=x", second], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"repeat it, {flag} a=x {flag} {second}" in done.output


def test_vllms_flag_is_ours(monkeypatch):
    seen = []
    monkeypatch.setattr("plait.platform.cli.serve.listen_on", lambda *_: None)
    monkeypatch.setattr(
        "plait.platform.cli.serve._serve",
        lambda options, settings, *_, **__: seen.append(settings),
    )
    monkeypatch.setattr("asyncio.Runner.run", lambda self, work: None)
    done = runner.invoke(app, ["serve", "--lora-modules", "a=x", "--adapters", "b=y"])
    assert done.exit_code == 0, done.output
    assert [source.name for source in seen[0].adapters] == ["a", "b"]


def test_a_key_file_may_limit_its_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("plain\nteam adapters=sql-*,tone weight=2\n# none\nother weight=0.5\n")
    made = settings({"api_key_file": str(file)})
    assert made.api_keys == ("plain",)
    assert made.grants == (
        Grant(key="team", adapters=("sql-*", "tone"), weight=2.0),
        Grant(key="other", weight=0.5),
    )


@pytest.mark.parametrize(
    ("lines", "given", "message"),
    [
        ("secret1 weight=-1", {}, "line 1: weight is a number above 0"),
        ("secret1 adaptor=x", {}, "line 1: a key is followed by"),
        ("a weight=1\nsecret1\nsecret1 weight=2", {}, "line 3: this key stands above"),
        ("secret1 weight=2", {"api_key": ["secret1"]}, "stands twice"),
        ("secret1", {"admin_key": "secret1"}, "the admin key is an API key as well"),
        ("secret1", {"admin_key": " "}, "the admin key is empty"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_and_not_shown(tmp_path, lines, given, message):
    file = tmp_path / "keys"
    file.write_text(lines)
    with pytest.raises(ConfigError, match=message) as refused:
        settings({"api_key_file": str(file), **given})
    assert "secret1" not in str(refused.value)


@pytest.fixture
def server(monkeypatch):
    """Install a reply; returns the requests made."""
    asked: list[httpx.Request] = []

    def install(status, body):
        def handle(request):
            asked.append(request)
            return httpx.Response(status, json=body)

        client = httpx.Client
        transport = httpx.MockTransport(handle)
        monkeypatch.setattr(httpx, "Client", lambda **kw: client(transport=transport, **kw))
        return asked

    return install


LOADED = {
    "name": "sql",
    "generation": "ab" * 32,
    "level": "device",
    "pinned": True,
    "leases": 2,
    "num_bytes": 1024,
    "device_bytes": 2048,
    "device_dtype": "int8",
    "report": {"sites": [{}, {}], "warnings": ["another base"]},
}


def test_the_list_is_for_people_and_for_programs(server):
    asked = server(200, {"data": [LOADED]})
    done = runner.invoke(app, ["adapters", "list", "--url", "http://s:1/v1/", "--api-key", "k"])
    assert done.exit_code == 0, done.output
    assert "sql" in done.stdout
    assert "abababababab  device, pinned, 2 KiB as int8, 2 sites, 2 requests" in done.stdout
    assert str(asked[0].url) == "http://s:1/v1/lora_adapters"
    assert asked[0].headers["authorization"] == "Bearer k"
    done = runner.invoke(app, ["adapters", "list", "--json"])
    assert json.loads(done.stdout) == [LOADED]


def test_a_load_says_what_is_wanted_and_what_came(server):
    asked = server(200, {"success": True, **LOADED})
    arguments = ["adapters", "load", "sql", "new", "--replace", "--expected-generation", "ff"]
    done = runner.invoke(app, arguments, env={"PLAIT_ADMIN_KEY": "boss"})
    assert done.exit_code == 0, done.output
    assert f"sql is loaded: generation {'ab' * 32}" in done.stdout
    assert "note: another base" in done.stdout
    body = json.loads(asked[0].content)
    assert (body["lora_name"], body["lora_path"], body["load_inplace"]) == ("sql", "new", True)
    assert (body["expected_generation"], body["pinned"]) == ("ff", False)
    assert asked[0].headers["authorization"] == "Bearer boss"


def test_a_refused_load_lists_what_did_not_fit(server):
    error = {"message": "1 tensor fits no site", "code": "invalid_lora_adapter"}
    server(400, {"error": error, "report": {"unmatched": ["x.lora_A.weight"]}})
    done = runner.invoke(app, ["adapters", "load", "sql", "new", "--admin-key", "boss"])
    assert done.exit_code == 1
    assert "unmatched: x.lora_A.weight" in done.output
    assert "plait: 1 tensor fits no site" in done.output


def test_without_the_admin_key_nothing_is_asked(server):
    asked = server(200, {})
    done = runner.invoke(app, ["adapters", "unload", "sql"])
    assert (done.exit_code, asked) == (2, [])
    assert "--admin-key" in done.output
