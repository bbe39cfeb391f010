"""GPTQ, AWQ and compressed-tensors: the numbers that their own definitions give."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.quantized_checkpoints import awq, compressed, gptq, write_pair
from support.step_driver import StepDriver, Track
from support.tiny_models import rewrite_config

from plait.platform.config import Options
from plait.platform.errors import ModelUnsupported
from plait.platform.model import check_model, load_model

KINDS = {
    "gptq": gptq(),
    "gptq, 8 bits, one group": gptq(bits=8, group=-1),
    "gptq with zeros": gptq(is_symmetric=False),
    "gptq version 2 with zeros": gptq(form="gptq_v2", is_symmetric=False, group=16),
    "awq": awq(),
    "awq, one group": awq(group=-1),
    "W4A16": compressed(form="pack-quantized"),
    "W4A16 with zeros": compressed(form="pack-quantized", is_symmetric=False),
    "W8A16": compressed(form="pack-quantized", bits=8, group=-1),
    "W8A8": compressed(form="int-quantized", bits=8, group=-1, dynamic=True),
    "W8A8 with zeros": compressed(form="int-quantized", bits=8, group=-1, is_symmetric=False),
}


def load(path, **options):
    return load_model(Options(model=str(path), progress=False, **{"dtype": "float32", **options}))


def logprobs(loaded):
    track = Track(list(range(5, 45)), num_output=1)
    StepDriver(loaded.executor).run([track])
    return torch.stack(track.logprobs)


@torch.no_grad()
def wanted_logprobs(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model(torch.arange(5, 45)[None]).logits[0].log_softmax(-1)


@pytest.mark.parametrize("name", KINDS)
def test_every_format_equals_transformers_on_what_it_stands_for(name, tmp_path):
    kind = KINDS[name]
    packed, plain = write_pair(kind, "llama", tmp_path)
    loaded = load(packed)
    torch.testing.assert_close(logprobs(loaded), wanted_logprobs(plain), rtol=0, atol=1e-4)
    formats = dict(loaded.info.weight_formats)
    assert any(f"int{kind.bits}" in form for form in formats)
    assert formats == dict(check_model(Options(model=str(packed), dtype="float32")).weight_formats)


@pytest.mark.parametrize("kind", [gptq(group=16), compressed(form="pack-quantized", group=16)])
def test_experts_are_joined_as_codes(kind, tmp_path):
    packed, plain = write_pair(kind, "qwen3_moe", tmp_path)
    wanted = wanted_logprobs(plain)
    for executor in ("auto", "torch"):
        loaded = load(packed, executor=executor)
        torch.testing.assert_close(logprobs(loaded), wanted, rtol=0, atol=1e-4)
    experts = loaded.executor._backbone.layers[0].mlp.experts.gate_up_proj
    assert {weight.bits for weight in experts.experts} == {4}


def test_expanded_and_quantised_anew_it_stays_near(tmp_path):
    packed, plain = write_pair(gptq(group=16), "llama", tmp_path)
    wanted = wanted_logprobs(plain)
    expanded = load(packed, quantization="none")
    assert [form for form, _ in expanded.info.weight_formats] == ["float32"]
    torch.testing.assert_close(logprobs(expanded), wanted, rtol=0, atol=1e-4)
    anew = load(packed, quantization="int8")  # the layers have fewer bits: they stay
    assert {form for form, _ in anew.info.weight_formats} == {"GPTQ int4", "int8", "float32"}
    assert (logprobs(anew) - wanted).abs().mean() < 0.02


def test_shuffled_groups_are_refused_until_they_are_expanded(tmp_path):
    packed, plain = write_pair(gptq(is_shuffled=True), "llama", tmp_path)
    with pytest.raises(ModelUnsupported, match=r"_proj\.weight.*desc_act"):
        load(packed)
    wanted = wanted_logprobs(plain)
    got = logprobs(load(packed, quantization="none"))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    assert (logprobs(load(packed, quantization="int8")) - wanted).abs().mean() < 0.02


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "fp8"}, "quantised with fp8.*unquantised"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4.*--quantization int8"),
        ({**gptq().config, "bits": 3}, "GPTQ of 3 bits"),
        ({**gptq().config, "checkpoint_format": "marlin"}, "GPTQ in the format 'marlin'"),
        ({**gptq().config, "checkpoint_format": None, "format": "marlin"}, "format 'marlin'"),
        ({**gptq().config, "is_marlin_format": True}, "GPTQ in the format 'gptq and marlin'"),
        ({**gptq().config, "format": "gptq_v2"}, "GPTQ in the format 'gptq and gptq_v2'"),
        ({**gptq().config, "pack_dtype": "int16"}, "GPTQ packed into int16"),
        ({**gptq().config, "rotation": "hadamard"}, "rotated weights"),
        ({**gptq().config, "group_size": "32"}, "group_size = '32'"),
        ({**awq().config, "version": "gemv"}, "AWQ in the layout 'gemv'"),
        (
            {**awq().config, "version": None, "checkpoint_format": "gemv"},
            "AWQ in the layout 'gemv'",
        ),
        (
            {**compressed(form="pack-quantized").config, "config_groups": {"W8A8": ["Linear"]}},
            "preset 'W8A8'",
        ),
        (
            {**compressed(form="pack-quantized").config, "config_groups": {}},
            "without config_groups",
        ),
        (["gptq"], "no mapping"),
        (
            {**compressed(form="pack-quantized").config, "format": "float-quantized"},
            "format 'float-quantized'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                        "input_activations": {"num_bits": 8, "type": "int", "dynamic": False},
                    }
                },
            },
            "stored ranges",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(config, words, tmp_path, checkpoint):
    source = checkpoint("llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    rewrite_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelUnsupported, match=words):
        load(tmp_path)
    assert not check_model(Options(model=str(tmp_path))).servable


LAYER = "model.layers.0.self_attn.q_proj."
W4A16, W8A8 = compressed(form="pack-quantized"), compressed(form="int-quantized", bits=8, group=-1)
ZEROS = compressed(form="pack-quantized", is_symmetric=False)


def not_finite(scales):
    scales.view(-1)[3] = torch.nan
    return scales


FAULTS = {
    "words of 16 bits": (gptq(), "qweight", lambda x: x.view(torch.int16), "stored as I16"),
    "words of one half": (gptq(), "qweight", lambda x: x[::2].contiguous(), "not of 4 bits"),
    "groups beyond the last": (gptq(), "g_idx", lambda x: x + 1, "groups beyond"),
    "groups before the first": (gptq(), "g_idx", lambda x: x - 1, "groups beyond"),
    "scales of too few outputs": (gptq(), "scales", lambda x: x[:, 1:], "ask for"),
    "scales of whole numbers": (gptq(), "scales", lambda x: x.int(), "stored as I32"),
    "one row of zero points": (gptq(), "qzeros", lambda x: x[:1], "ask for"),
    "gptq scales not finite": (gptq(), "scales", not_finite, "not finite"),
    "awq scales not finite": (awq(), "scales", not_finite, "not finite"),
    "awq words of 64 bits": (awq(), "qweight", lambda x: x.long(), "stored as I64"),
    "awq zero points of few": (awq(), "qzeros", lambda x: x[:, 1:], "ask for"),
    "W4A16 scales not finite": (W4A16, "weight_scale", not_finite, "not finite"),
    "W4A16 scales of few": (W4A16, "weight_scale", lambda x: x[1:], "for 64 outputs"),
    "W4A16 scales for all": (W4A16, "weight_scale", lambda x: x[:1], "for 64 outputs"),
    "W4A16 of another shape": (W4A16, "weight_shape", lambda x: x + 1, "do not hold"),
    "W4A16 without zeros": (ZEROS, "weight_zero_point", None, "missing.*not symmetric"),
    "W4A16 with few zeros": (ZEROS, "weight_zero_point", lambda x: x[1:], "ask for"),
    "W8A8 without scales": (W8A8, "weight_scale", None, "whole numbers where weights belong"),
    "W8A8 without signs": (W8A8, "weight", lambda x: x.view(torch.uint8), "stored as U8"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_parts_that_do_not_fit_each_other_are_refused(name, tmp_path):
    kind, part, change, words = FAULTS[name]
    packed, _ = write_pair(kind, "llama", tmp_path, num_hidden_layers=1)
    tensors = load_file(packed / "model.safetensors")
    found = tensors.pop(LAYER + part)
    if change is not None:
        tensors[LAYER + part] = change(found).contiguous()
    save_file(tensors, packed / "model.safetensors")
    for quantization in ("auto", "none"):
        with pytest.raises(ModelUnsupported, match=words):
            load(packed, quantization=quantization)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (gptq(), {"bits": 8}, "not of 8 bits"),
        (gptq(group=-1), {"group_size": 32}, "1 scales for 96 inputs in groups of 32"),
        (gptq(), {"group_size": 0}, "groups of 0 inputs"),
        (W4A16, {"config_groups": compressed(form="pack-quantized", group=64).config
            ["config_groups"]}, "has groups of 64"),
        (W4A16, {"config_groups": compressed(form="pack-quantized", bits=8).config
            ["config_groups"]}, "do not hold"),
    ],
)  # fmt: skip
def test_a_config_that_its_tensors_contradict_is_refused(kind, changes, words, tmp_path):
    packed, _ = write_pair(kind, "llama", tmp_path, num_hidden_layers=1)
    rewrite_config(packed, quantization_config={**kind.config, **changes})
    with pytest.raises(ModelUnsupported, match=words):
        load(packed, quantization="none")


def test_layers_of_several_schemes_are_each_read_by_theirs(tmp_path):
    packed, plain = write_pair(W4A16, "llama", tmp_path)
    other = compressed(form="pack-quantized", bits=8, group=-1)
    eight, eight_plain = write_pair(other, "llama", tmp_path / "eight")
    for goal, source in ((packed, eight), (plain, eight_plain)):
        tensors, more = (load_file(path / "model.safetensors") for path in (goal, source))
        tensors |= {name: t for name, t in more.items() if "v_proj" in name or "down" in name}
        save_file(tensors, goal / "model.safetensors", metadata={"format": "pt"})
    groups = {
        "four": W4A16.config["config_groups"]["group_0"],
        "eight": other.config["config_groups"]["group_0"],
    }
    rewrite_config(packed, quantization_config={**W4A16.config, "config_groups": groups})
    loaded = load(packed)
    torch.testing.assert_close(logprobs(loaded), wanted_logprobs(plain), rtol=0, atol=1e-4)
    assert {"compressed int4", "compressed int8"} < dict(loaded.info.weight_formats).keys()


def test_version_two_is_known_by_either_key(tmp_path):
    kind = gptq(form="gptq_v2", is_symmetric=False)
    packed, plain = write_pair(kind, "llama", tmp_path)
    config = {k: v for k, v in kind.config.items() if k != "checkpoint_format"}
    rewrite_config(packed, quantization_config={**config, "format": "gptq_v2"})
    torch.testing.assert_close(logprobs(load(packed)), wanted_logprobs(plain), rtol=0, atol=1e-4)


def test_a_weight_that_is_there_in_both_forms_is_refused(tmp_path):
    packed, plain = write_pair(gptq(), "llama", tmp_path, num_hidden_layers=1)
    tensors = load_file(packed / "model.safetensors")
    tensors[LAYER + "weight"] = load_file(plain / "model.safetensors")[LAYER + "weight"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelUnsupported, match="both quantised and as plain"):
        load(packed)


def test_scales_that_do_not_fit_the_groups_are_refused(tmp_path):
    packed, _ = write_pair(gptq(), "llama", tmp_path)
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    rewrite_config(packed, quantization_config={**config, "group_size": 16})
    with pytest.raises(ModelUnsupported, match=r"scales for .* inputs in groups of 16"):
        load(packed)


def test_a_missing_part_is_named(tmp_path):
    packed, _ = write_pair(awq(), "llama", tmp_path)
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"up_proj.*scales.*missing"):
        load(packed)
