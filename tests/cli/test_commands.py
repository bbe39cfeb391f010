"""The command line as a user meets it: help, exit codes, last lines."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from plait.platform.cli import serve as serve_module
from plait.platform.cli import table
from plait.platform.cli.command import with_flags
from plait.platform.cli.main import app
from plait.platform.cli.serve import listen_on, tokenizer_source
from plait.platform.cli.settings import engine_options
from plait.platform.cli.sources import Resolved
from plait.platform.cli.speculative_config import speculative_options
from plait.platform.cli.values import piped
from plait.platform.config import Options
from plait.platform.errors import ConfigError, ModelUnsupported

runner = CliRunner()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith("PLAIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def probe(monkeypatch):
    """A command with serve's flags that notes what it got."""
    seen: list[Resolved] = []
    environ: dict[str, str] = {}
    small = typer.Typer(pretty_exceptions_enable=False)

    @small.command()
    @with_flags(table.SERVE, table.KNOWN)
    def command(
        extra: Annotated[str, typer.Option("--extra")] = "none", *, flags: Resolved
    ) -> None:
        seen.append(flags)
        environ.update(os.environ)
        if extra == "unsupported":
            raise ModelUnsupported("no such layer")
        if extra == "bug":
            raise RuntimeError("boom")
        if extra == "interrupt":
            raise KeyboardInterrupt

    def run(*arguments, env=None):
        return runner.invoke(small, list(arguments), env=env), seen, environ

    return run


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["bench", "serve", "-h"]])
def test_help_and_version_load_nothing_heavy(arguments):
    heavy = ("torch", "transformers", "fastapi", "uvicorn", "numpy", "zmq", "httpx", "tokenizers")
    code = (
        "import sys; from plait.platform.cli.main import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"loaded = [m for m in {heavy!r} if m in sys.modules]\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_the_version_alone_is_an_option():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"plait {importlib.metadata.version('plait')}\n"


def test_version_reads_no_package_but_its_metadata():
    code = (
        "import sys; from plait.platform.cli.version import collect\n"
        "facts = collect(); assert facts['torch'][0].isdigit(), facts\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert json.loads(runner.invoke(app, ["version", "--json"]).output)["plait"]


def test_flags_come_before_variables_before_the_file(probe, tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("port: 1\nhost: localhost\nblock-size: 32\n")
    result, seen, _ = probe(
        "--config", str(file), "--port", "3", env={"PLAIT_PORT": "2", "PLAIT_HOST": "::1"}
    )
    assert result.exit_code == 0, result.output
    (flags,) = seen
    assert [flags[k] for k in ("port", "host", "block_size")] == [3, "::1", 32]


def test_negated_flags_turn_off_what_a_variable_turned_on(probe):
    _, seen, _ = probe("--no-progress", "--no-offline", env={"PLAIT_OFFLINE": "1"})
    assert seen[0]["progress"] is False
    assert seen[0]["offline"] is False


def test_a_flag_and_its_negation_contradict(probe):
    result, _, _ = probe("--progress", "--no-progress")
    assert result.exit_code == 2
    assert "--progress and --no-progress: keep one" in result.stderr


def test_offline_is_set_before_the_command_imports_anything(probe):
    _, _, environ = probe("--offline", "--cpu-isa", "avx2", "--log-level", "error")
    assert environ["HF_HUB_OFFLINE"] == "1"
    assert environ["PLAIT_CPU_ISA"] == "avx2"
    assert environ["PLAIT_LOG_LEVEL"] == "error"


@pytest.mark.parametrize(
    ("arguments", "env", "code", "message"),
    [
        (["--port", "x"], {}, 2, "plait: --port wants a whole number, not 'x'"),
        ([], {"PLAIT_PROT": "1"}, 2, "Did you mean PLAIT_PORT?"),
        (["--extra", "unsupported"], {}, 1, "plait: no such layer"),
        (["--extra", "bug"], {}, 1, "plait: RuntimeError: boom. This is a fault of plait"),
        (["--extra", "interrupt"], {}, 130, ""),
    ],
)
def test_a_failure_is_one_clear_last_line_and_an_exit_code(probe, arguments, env, code, message):
    result, _, _ = probe(*arguments, env=env)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_trace(probe):
    result, _, _ = probe("--debug", "--extra", "bug")
    assert "Traceback" in result.stderr
    assert result.stderr.strip().endswith("plait: RuntimeError: boom.")


def test_an_unknown_flag_names_near_ones():
    result = runner.invoke(app, ["serve", "--max-model-length", "5"])
    assert result.exit_code == 2
    assert "--max-model-len" in result.stderr


def test_serve_refuses_a_public_address_before_it_loads_anything():
    result = runner.invoke(app, ["serve", "--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "there is no API key" in result.stderr


def test_serve_refuses_a_port_in_use_before_it_loads_anything():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = runner.invoke(app, ["serve", "--port", str(port)])
        assert result.exit_code == 2
        assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr
    with listen_on("127.0.0.1", port) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


def test_the_tokenizer_is_loaded_early_only_from_this_machine(tmp_path):
    assert tokenizer_source(Options(model="some/hub-id")) is None
    assert tokenizer_source(Options(model=str(tmp_path))) == tmp_path
    (tmp_path / "m.gguf").touch()
    assert tokenizer_source(Options(model=str(tmp_path))) == tmp_path / "m.gguf"
    (tmp_path / "config.json").touch()
    assert tokenizer_source(Options(model=str(tmp_path))) == tmp_path


def test_serve_ends_what_it_started_when_a_part_fails(monkeypatch):
    import asyncio

    from rich.console import Console

    from plait.platform.server.process import ProcessClient

    closed = []

    class Started:
        async def close(self):
            closed.append(True)

    async def start(options, on_phase):
        return Started()

    def no_tokenizer(options, source):
        raise ConfigError("no tokenizer here")

    monkeypatch.setattr(ProcessClient, "start", start)
    monkeypatch.setattr(serve_module, "_load_tokenizer", no_tokenizer)
    with pytest.raises(ConfigError, match="no tokenizer here"):
        asyncio.run(serve_module._start(Options(model="."), Console(stderr=True)))
    assert closed == [True]


def test_the_banner_names_what_counts():
    import io

    from rich.console import Console

    from plait.platform.cli import banner
    from plait.platform.config import (
        CacheConfig,
        EngineConfig,
        KVGroup,
        ModelInfo,
        SchedulerConfig,
    )

    group = KVGroup(layers=(0,), window=None, num_kv_heads=1, head_size=8, num_blocks=101)

    class Client:
        facts: ClassVar = {"arithmetic": ["weights 5MiB; free beside them 1GiB"]}
        config = EngineConfig(
            options=Options(),
            model=ModelInfo(
                name="tiny [x]",
                architecture="LlamaForCausalLM",
                source="directory",
                dtype="float32",
                executor="torch",
                vocab_size=10,
                context_length=4096,
                eos_token_ids=(),
                weight_bytes=5 << 20,
                weight_formats=(("Q4_0", 3 << 20), ("bfloat16", 2 << 20)),
                weights_from="mapped in 0.01 s",
                notes=("float16 weights are computed in float32",),
            ),
            cache=CacheConfig(
                block_size=16, groups=(group,), dtype="float32", enable_prefix_caching=False
            ),
            scheduler=SchedulerConfig(
                max_model_len=400, max_num_seqs=4, max_num_batched_tokens=64, max_num_queued=8
            ),
        )

    out = io.StringIO()
    banner.show(Console(file=out, width=120), Client(), url="http://h:1", seconds=1.25)
    text = out.getvalue()
    for fact in (
        "ready in 1.2 s",
        "http://h:1",
        "tiny [x] (directory)",
        "LlamaForCausalLM",
        "3 MiB Q4_0 + 2 MiB bfloat16; mapped in 0.01 s",
        "400 tokens of the model's 4,096",
        "1,600 tokens, float32, blocks of 16",
        "4.0 requests of full context",
        "off, as asked",
        "drafts from prompt and answer, recent answers and grammars; up to 16 a step",
        "weights 5MiB; free beside them 1GiB",
        "float16 weights are computed in float32",
    ):
        assert fact in text, fact


def test_the_banner_names_adapters_and_what_they_are_kept_as_where_that_was_asked_for():
    from plait.platform.cli.banner import adapter_lines

    assert list(adapter_lines(Options(), [])) == []
    assert list(adapter_lines(Options(adapter_dtype="int8"), [])) == ["kept as int8, as asked"]
    lines = list(adapter_lines(Options(adapter_dtype="int8"), [f"a{i}" for i in range(18)]))
    assert lines == [
        ", ".join(f"a{i}" for i in range(16)) + " and 2 more",
        "kept as int8, as asked",
    ]


def test_the_banner_names_the_sources_of_drafts():
    from plait.platform.cli.banner import speculation

    assert speculation(Options(speculation="off")) == "off, as asked"
    line = speculation(Options(draft_model="someone/tiny-draft", max_draft_tokens=4))
    assert line.endswith("recent answers, grammars and tiny-draft; up to 4 a step")


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4}, Options(max_draft_tokens=4)),
        ({"method": "suffix"}, Options()),
        ({"model": "small"}, Options(draft_model="small")),
        ({"method": "eagle3", "model": "a/head"}, Options(draft_model="a/head")),
    ],
)
def test_vllms_speculative_config_says_what_our_flags_say(probe, config, meant):
    given = ("--speculative-config", json.dumps(config))
    _, seen, _ = probe(*given)
    assert engine_options(seen[-1]) == meant
    probe(*given, "--draft", "x")
    with pytest.raises(ConfigError, match="--draft both decide"):
        engine_options(seen[-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "wants a JSON object"),
        ('["ngram"]', "wants a JSON object"),
        ("{}", "a method among ngram, suffix, draft_model, eagle3, not None"),
        ('{"method": "medusa", "model": "m"}', "not 'medusa'"),
        ('{"method": "ngram", "prompt_lookup_max": 5}', "prompt_lookup_max, which Plait does not"),
        ('{"method": "ngram", "model": "m"}', "takes no model"),
        ('{"method": "draft_model"}', "needs a model"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "of at least 1, not True"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "of at least 1, not 0"),
    ],
)
def test_what_vllms_speculative_config_says_beyond_them_is_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        speculative_options(text, "--speculative-config")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["complete", "x", "--api-key", "k"], "--api-key is for a server"),
        (["complete", "x", "--url", "http://h", "--dtype", "float32"], "--dtype has no effect"),
        (["complete", ""], "the prompt is empty"),
        (["chat", "--temperature", "-1"], "--temperature wants at least 0"),
        (["serve", "--threads", "100000"], "--threads wants at most 1024"),
        (["bench", "latency", "--prompt-file", "f", "--input-len", "3"], "drop --input-len"),
        (
            ["bench", "throughput", "--compare-speculation", "--random-adapters", "2"],
            "drop --random-adapters",
        ),
        (
            ["bench", "throughput", "--compare-speculation", "--speculation", "off"],
            "--speculation off leaves nothing for --compare-speculation",
        ),
        (["bench", "serve", "--compare-model", "m"], "--compare-model names a model"),
        (["bench", "serve", "--goodput", "speed:5"], "--goodput knows ttft, tpot, e2e"),
        (["serve", "--config", "/nowhere.yaml"], "cannot read --config"),
    ],
)
def test_combinations_without_sense_are_refused(arguments, message):
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of standard input, by locale
@pytest.mark.parametrize("command", [["complete"], ["schema", "check", "-"]])
def test_piped_text_that_is_no_utf_8_says_how_to_convert_it(command, errors):
    class Other(CliRunner):
        @contextlib.contextmanager
        def isolation(self, *args, **options):
            with super().isolation(*args, **options) as streams:
                sys.stdin.reconfigure(errors=errors)
                yield streams

    result = Other().invoke(app, command, input=b'"caf\xe9"')
    assert result.exit_code == 2
    assert "the text is no UTF-8: convert it" in result.stderr


def test_a_closed_standard_input_is_no_fault_of_plait(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError, match="standard input is closed"):
        piped(lambda stdin: stdin.read())


def test_an_argument_that_is_no_utf_8_says_how_to_convert_it():
    result = runner.invoke(app, ["complete", "caf\udce9"])
    assert result.exit_code == 2
    assert "the text is no UTF-8: convert it" in result.stderr


def test_a_server_told_to_end_while_it_starts_ends_without_a_trace(monkeypatch):
    async def told(*_: object) -> None:
        with serve_module._cancelled_by(signal.SIGTERM):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

    monkeypatch.setattr(serve_module, "_start", told)
    result = runner.invoke(app, ["serve", "owner/name", "--port", "0"])
    assert (result.exit_code, result.output) == (143, "")
