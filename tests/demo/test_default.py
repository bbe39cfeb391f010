"""What comes where no model is named, and what a user's own words change of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plait import LLM
from plait.platform.cli.serve import _with_default
from plait.platform.cli.settings import engine_options, server_settings
from plait.platform.cli.sources import resolve
from plait.platform.cli.table import KNOWN, SERVE
from plait.platform.config import Options
from plait.platform.demo import default
from plait.platform.demo.default import default_adapters, with_default, with_default_draft

ASSEMBLED = Path("/assembled")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two adapters and a draft model, and a checkpoint that is made already."""
    for name, file in (("b", "adapter_config.json"), ("a", "adapter_config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").touch()
    monkeypatch.setattr(default, "PARTS", tmp_path)
    monkeypatch.setattr(default, "assemble", lambda **_: ASSEMBLED)
    return tmp_path


def test_without_a_model_there_is_all_of_it(parts: Path) -> None:
    options = with_default(with_default_draft(Options()))
    assert options.model == str(ASSEMBLED)
    assert options.served_model_name == "SmolLM2-135M-Instruct"
    assert options.draft_model == str(parts / "draft")
    assert options.quantization == "int4"
    assert default_adapters(options) == {"a": parts / "a", "b": parts / "b"}


def test_a_named_model_comes_alone() -> None:
    options = Options(model="some/model")
    assert with_default(with_default_draft(options)) is options


def test_what_is_said_goes_before_the_default(parts: Path) -> None:
    said = Options(quantization="none", draft_model="mine", served_model_name="me")
    options = with_default(with_default_draft(said))
    assert (options.quantization, options.draft_model) == ("none", "mine")
    assert options.served_model_name == "me"
    assert with_default_draft(Options(speculation="off")).draft_model is None
    assert default_adapters(Options(adapter_memory_bytes=0)) == {}


def served(*arguments: tuple[str, object]) -> tuple[Options, dict[str, str]]:
    flags = resolve(SERVE, KNOWN, given=dict(arguments), environ={})
    options, settings = _with_default(engine_options(flags), server_settings(flags), flags)
    return options, {each.name: each.source for each in settings.adapters}


def test_flags_of_serve_override_the_part_that_they_are_about(parts: Path) -> None:
    assert served()[1] == {"a": str(parts / "a"), "b": str(parts / "b")}
    assert served(("adapters", ["mine=x"]))[1] == {"mine": "x"}
    assert served(("max_adapters", "0"))[1] == {}
    options, adapters = served(("speculative_config", '{"method": "ngram"}'))
    assert options.draft_model is None
    assert len(adapters) == 2
    assert served(("draft", "mine"))[0].draft_model == "mine"


def test_finding_it_made_imports_nothing_heavy() -> None:
    code = (
        "import sys; from plait.platform.config import Options\n"
        "from plait.platform.demo import assemble, default\n"
        "default.assemble = lambda **_: assemble._digest(assemble.model_path())\n"
        "default.default_adapters(default.with_default(Options()))\n"
        "heavy = {'torch', 'transformers', 'gguf', 'safetensors', 'numpy'} & {*sys.modules}\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_llm_has_the_same_and_may_go_without_adapters_and_drafts() -> None:
    options = {"kv_cache_bytes": 32 << 20, "max_model_len": 256, "num_threads": 1}
    with LLM(**options) as llm:
        assert llm.config.model.name == "SmolLM2-135M-Instruct"
        assert llm.config.model.vision is not None
        assert {*llm.list_adapters()} == {*default_adapters(Options())}
        assert llm.config.options.quantization == "int4"
        assert llm.config.options.draft_model == str(default.PARTS / "draft")
    with LLM(adapters={}, speculation="off", **options) as llm:
        assert not llm.list_adapters()
        assert llm.config.options.draft_model is None


START = """
import sys
from plait.platform.starting.light_torch import import_torch

import_torch(light=True)
from plait import LLM, SamplingParams

with LLM(kv_cache_bytes=32 << 20, max_model_len=256, num_threads=1, progress=False) as llm:
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4))
    assert output.outputs[0].token_ids
    assert llm.config.options.draft_model
heavy = ("transformers", "torch._dynamo", "torch.export", "httpx", "xgrammar", "llguidance")
print([name for name in heavy if name in sys.modules])
"""


def test_a_later_start_with_the_draft_head_imports_nothing_heavy() -> None:
    for _ in range(2):  # the first may have to pack what the cache does not have
        done = subprocess.run(
            [sys.executable, "-c", START], capture_output=True, text=True, check=True
        )
    assert done.stdout.splitlines()[-1] == "[]"
