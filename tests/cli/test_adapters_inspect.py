"""`plait adapters inspect`, with and without a model."""

import json

import pytest
import typer
from safetensors.torch import load_file, save_file
from support.adapter_sites import sites_of
from support.peft_adapters import EXPERT_KINDS, KINDS, load_base, make_adapter, make_kind
from support.tiny_models import make_checkpoint
from typer.testing import CliRunner

from plait.adapters.guess import guess_sites
from plait.adapters.loading import inspect_adapter
from plait.adapters.store import AdapterStore
from plait.platform.cli.adapters_inspect import inspect


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "llama": make_checkpoint("llama", root / "llama", tokenizer=False),
        "qwen3_moe": make_checkpoint("qwen3_moe", root / "moe", tokenizer=False, num_experts=3),
    }


def run(*args):
    app = typer.Typer()
    app.command()(inspect)
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.output


@pytest.mark.parametrize("kind", [*KINDS, *EXPERT_KINDS])
def test_without_a_model_the_same_is_found_as_with_it(checkpoints, tmp_path, kind):
    checkpoint = checkpoints["qwen3_moe" if kind in EXPERT_KINDS else "llama"]
    directory = make_kind(kind, checkpoint, tmp_path)
    guessed = inspect_adapter(directory, guess_sites, max_rank=200).info.report
    known = inspect_adapter(directory, sites_of(load_base(checkpoint)), max_rank=200).info.report
    if kind == "trained_tokens":  # without the model it is open whether the head follows
        guessed, known = guessed.sites[:1], known.sites[:1]
    else:
        assert guessed.num_bytes == known.num_bytes
        guessed, known = guessed.sites, known.sites
    assert set(guessed) == set(known)


def test_tokens_that_are_added_are_seen_with_a_model_alone(checkpoints, tmp_path):
    directory = make_adapter(
        checkpoints["llama"],
        tmp_path,
        num_new_tokens=2,
        target_modules=["q_proj"],
        trainable_token_indices=[307, 308],
    )
    code, output = run(directory, "--model", checkpoints["llama"], "--json")
    assert (code, json.loads(output)["vocab_size"]) == (0, 309)
    assert run(directory)[0] == 0


def test_json_has_what_a_load_reports(checkpoints, tmp_path):
    directory = make_kind("patterns", checkpoints["llama"], tmp_path / "a")
    code, output = run(directory, "--model", checkpoints["llama"], "--json")
    found = json.loads(output)
    assert (code, found["loadable"], found["max_rank"]) == (0, True, 7)
    assert found["report"]["changes_kv"]
    ranks = {site["name"]: site["rank"] for site in found["report"]["sites"]}
    assert ranks["model.layers.0.self_attn.q_proj"] == 7
    assert ranks["model.layers.1.self_attn.q_proj"] == 4
    store = AdapterStore(tmp_path / "store")
    assert store.add_directory(directory).generation == found["generation"]


def test_text_has_a_line_for_sites_that_differ_in_their_layer_alone(checkpoints, tmp_path):
    code, output = run(make_kind("attention", checkpoints["llama"], tmp_path))
    assert code == 0
    assert "can be loaded" in output
    (line,) = [text for text in output.splitlines() if "v_proj" in text]
    assert "model.layers.*.self_attn.v_proj" in line
    assert "3 × low_rank, rank 8, scale 2" in line


def test_what_cannot_be_loaded_is_said_and_exits_with_1(checkpoints, tmp_path):
    directory = make_kind("q_only", checkpoints["llama"], tmp_path)
    weights = directory / "adapter_model.safetensors"
    moved = {name.replace("layers.1", "layers.9"): t for name, t in load_file(weights).items()}
    save_file(moved, weights)
    assert run(directory)[0] == 0  # some model may have such a layer
    code, output = run(directory, "--model", checkpoints["llama"])
    assert code == 1
    assert "unmatched" in output
    assert "layers.9.self_attn.q_proj.lora_A.weight" in output
    code, output = run(directory, "--model", checkpoints["llama"], "--json")
    found = json.loads(output)
    assert (code, found["loadable"], found["code"]) == (1, False, "invalid_lora_adapter")
    assert len(found["report"]["unmatched"]) == 2


def test_a_path_that_is_none_and_no_hub_id_is_not_found(tmp_path):
    code, output = run(tmp_path / "nowhere", "--json", "--offline")
    assert (code, json.loads(output)["code"]) == (1, "adapter_path_not_found")


def test_a_broken_bundle_is_found_too(checkpoints, tmp_path):
    directory = make_kind("q_only", checkpoints["llama"], tmp_path)
    (directory / "plait_adapter.json").write_text('{"stops": "x"}')
    code, output = run(directory)
    assert code == 1
    assert "stops" in output
