"""Checkpoints: what loads, what it costs, and what is refused with which words."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.step_driver import StepDriver, Track
from support.tiny_models import make_checkpoint, rewrite_config
from support.tiny_vision import make_vision_checkpoint

from plait.platform.config import Options
from plait.platform.errors import ConfigError, ModelUnsupported
from plait.platform.model import check_model, load_model


def load(directory, **options):
    return load_model(Options(model=str(directory), progress=False, **options))


def outputs(directory, **options):
    track = Track(list(range(10, 40)), num_output=8)
    StepDriver(load(directory, **options).executor).run([track])
    return track.output


def edit_tensors(directory, edit):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_shards_and_one_file_give_the_same(tmp_path):
    one = make_checkpoint("qwen3_moe", tmp_path / "one")
    many = make_checkpoint("qwen3_moe", tmp_path / "many", max_shard_size="200KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    assert outputs(one) == outputs(many)


def test_a_tied_weight_is_kept_once(tmp_path):
    directory = make_checkpoint("qwen2", tmp_path)
    loaded = load(directory, executor="torch")
    head = loaded.executor.leaves.sites["lm_head"].leaf
    embedding = loaded.executor._backbone.embed_tokens.weight
    assert embedding.is_meta
    ids = torch.tensor([[0, 17, 306]])
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(loaded.executor._backbone.embed_tokens(ids), table[ids])
    assert head.packed.num_bytes >= table.nbytes
    assert loaded.info.weight_bytes == sum(
        t.nbytes for t in load_file(directory / "model.safetensors").values()
    )


def test_a_head_stored_beside_a_tied_embedding_is_kept_if_it_differs(tmp_path):
    """As transformers does: the config says tied, the checkpoint says otherwise."""
    directory = make_checkpoint("qwen2", tmp_path)
    other = torch.randn(307, 64)
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": other}))
    loaded = load(directory, executor="torch")
    torch.testing.assert_close(loaded.executor.leaves.sites["lm_head"].leaf.packed.unpack(), other)
    assert not loaded.executor._backbone.embed_tokens.weight.is_meta


def test_weights_survive_the_checkpoint_files(tmp_path):
    """Nothing is left mapped: a file that is overwritten while serving must not change answers."""
    directory = make_checkpoint("llama", tmp_path)
    executor = load(directory).executor
    first, second = (Track(list(range(10, 40)), num_output=8) for _ in range(2))
    StepDriver(executor).run([first])
    path = directory / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    StepDriver(executor).run([second])
    assert first.output == second.output


def test_bfloat16_checkpoint_in_float32_is_exact(tmp_path):
    half = make_checkpoint("llama", tmp_path / "half", dtype=torch.bfloat16)
    wide = make_checkpoint("llama", tmp_path / "wide", dtype=torch.bfloat16)
    edit_tensors(wide, lambda t: t.update({k: v.float() for k, v in t.items()}))
    rewrite_config(wide, dtype="float32")
    assert outputs(half, dtype="float32") == outputs(wide)


def test_float16_is_noted(tmp_path):
    directory = make_checkpoint("llama", tmp_path, dtype=torch.float16)
    info = load(directory).info
    assert info.dtype in ("float32", "bfloat16")
    assert info.notes == (f"float16 weights are computed in {info.dtype}",)


@pytest.mark.parametrize("base", ["org/base", None])
def test_an_adapter_in_a_models_place_is_told_as_one_and_what_serves_it(base, tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("")
    with pytest.raises(ModelUnsupported) as caught:
        load(tmp_path)
    assert check_model(Options(model=str(tmp_path))).reason == caught.value.message
    assert f"plait serve {base or 'BASE'} --adapter NAME={tmp_path}" in caught.value.message
    named = f"{tmp_path.name} is an adapter of org/base, not a model"
    assert (named in caught.value.message) is (base is not None)


def test_info_and_report_tell_the_facts(tmp_path):
    directory = make_checkpoint("gemma2", tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    info = load(directory, served_model_name="mine").info
    assert (info.name, info.architecture, info.source) == ("mine", "Gemma2ForCausalLM", "directory")
    assert (info.vocab_size, info.context_length) == (307, 512)
    assert info.eos_token_ids == (4, 2)
    report = check_model(Options(model=str(directory)))
    assert report.servable
    assert report.reason is None
    assert report.weight_bytes == info.weight_bytes == 4 * report.num_parameters
    assert [(g.layers, g.window) for g in report.kv_groups] == [((0, 2), 12), ((1, 3), None)]
    assert report.kv_bytes_per_token == 4 * 2 * 4 * 2 * 32  # layers, k and v, bytes, heads, size


def test_a_window_no_request_outgrows_is_none(tmp_path):
    directory = make_checkpoint("gemma2", tmp_path)
    groups = load(directory, max_model_len=12).executor.kv_groups
    assert [(g.layers, g.window) for g in groups] == [((0, 1, 2, 3), None)]


def drop(name):
    return lambda tensors: tensors.pop(name)


def replace(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (drop("model.layers.1.self_attn.k_proj.weight"), "1 tensors .*missing.*k_proj"),
        (replace("model.layers.0.extra.weight", torch.ones(2)), "no place in Llama.*extra"),
        (
            replace("model.norm.weight", torch.ones(63)),
            r"model.norm.weight has shape \[63\].*\[64\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(edit, words, tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    edit_tensors(directory, edit)
    with pytest.raises(ModelUnsupported, match=words):
        load(directory)
    assert not check_model(Options(model=str(directory))).servable


def test_a_missing_expert_is_refused(tmp_path):
    directory = make_checkpoint("mixtral", tmp_path)
    name = next(n for n in load_file(directory / "model.safetensors") if ".experts.2." in n)
    edit_tensors(directory, drop(name))
    with pytest.raises(ModelUnsupported, match="experts"):
        load(directory)


def test_missing_and_truncated_files_are_named(tmp_path):
    directory = make_checkpoint("llama", tmp_path, max_shard_size="100KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelUnsupported, match=f"{shards[1].name}.*truncated"):
        load(directory)
    shards[1].unlink()
    with pytest.raises(ModelUnsupported, match=f"1 of {len(shards)} shards.*{shards[1].name}"):
        load(directory)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    directory = make_checkpoint("llama", tmp_path, max_shard_size="100KB")
    first, second = sorted(directory.glob("model-*.safetensors"))[:2]
    tensors, others = load_file(first), load_file(second)
    name = next(iter(tensors))
    save_file({**others, name: 2 * tensors[name]}, second, metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match=f"{re.escape(name)} is in two files"):
        load(directory)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_whole_numbers_are_no_weights(dtype, tmp_path):
    directory = make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(directory, lambda t: t.update({name: (50 * t[name]).to(dtype)}))
    with pytest.raises(ModelUnsupported, match=f"{re.escape(name)} hold whole numbers"):
        load(directory)


def test_pickles_are_refused(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match=r"pickles.*safetensors"):
        load(directory)


def test_no_config_and_no_path(tmp_path):
    with pytest.raises(ModelUnsupported, match=r"no config.json"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no file or directory"):
        load(tmp_path / "nothing" / "here")


@pytest.mark.parametrize(
    "path",
    ["./absent", "../absent", "absent/", "/no/such", "a/b/c", "a..b/c", "my model", "x.gguf"],
)
def test_what_cannot_be_a_hub_id_is_a_path_that_is_not_there(path):
    with pytest.raises(ConfigError, match=f"no file or directory {re.escape(path)}"):
        load(path)


def test_a_hub_id_is_not_fetched_when_offline(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"neither a local path nor in the hub cache.*OFFLINE"):
        load("some-org/some-model")


def test_flags_that_cannot_hold(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match="use at most 512"):
        load(directory, max_model_len=513)
    for options in ({"dtype": "float64"}, {"executor": "magic"}, {"device": "cuda:9"}):
        with pytest.raises(ConfigError):
            load(directory, **options)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_towers_keep_their_numbers_when_the_language_model_is_quantised(family, tmp_path):
    make_vision_checkpoint(family, tmp_path)
    executor = load(tmp_path, quantization="int8", executor="torch").executor
    kinds = {name: type(site.leaf.packed).__name__ for name, site in executor.leaves.sites.items()}
    towers = {kind for name, kind in kinds.items() if "vision" in name or "visual" in name}
    language = {kind for name, kind in kinds.items() if "language_model" in name}
    assert (towers, language) == ({"PackedWeight"}, {"PackedQuantized"})


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "gemma2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_any_family_is_quantised_while_it_is_loaded(family, quantization, tmp_path):
    directory = make_checkpoint(family, tmp_path)
    options = {"dtype": "float32", "quantization": quantization}
    loaded = load(directory, **options)
    report = check_model(Options(model=str(directory), **options))
    assert report.weight_formats == loaded.info.weight_formats
    assert {name for name, _ in report.weight_formats} >= {quantization, "int8"}
    got, wanted = (scores(x) for x in (loaded, load(directory, dtype="float32")))
    off = (got - wanted).abs().mean()
    assert 0 < off < {"int8": 0.05, "int4": 0.5}[quantization]


def scores(loaded):
    track = Track(list(range(10, 40)), num_output=1)
    StepDriver(loaded.executor).run([track])
    return torch.stack(track.logprobs)
