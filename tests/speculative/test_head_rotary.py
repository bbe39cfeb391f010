"""Frequencies of heads' rotations against those of transformers' own classes."""

import json

import pytest
import torch
from support.eagle_heads import HeadShape
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from plait.platform.errors import ModelUnsupported
from plait.speculative.eagle_config import read_head_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0}
CASES = {
    "plain": {},
    "theta alone": {"rope_theta": 500000},
    "nothing but sizes": {"rope_theta": None, "max_position_embeddings": None},
    "theta among parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "linear by its old name": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3, **OLD}, "rope_theta": 5e5},
    "llama3, the context its own": {"rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    "yarn": {"rope_scaling": {**YARN, **OLD}},
    "yarn, the context its own": {"rope_scaling": {**YARN, "rope_theta": 1e6}},
    "yarn, scaled": {"rope_scaling": {**YARN, **OLD, "attention_factor": 0.7, "beta_fast": 20}},
    "yarn, two scales": {"rope_scaling": {**YARN, **OLD, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "yarn, not truncated": {"rope_scaling": {**YARN, **OLD, "truncate": False, "beta_slow": 2}},
    "yarn, a factor below one": {"rope_scaling": {"rope_type": "yarn", "factor": 0.5, **OLD}},
}


def written(path, fields, **shape):
    config = {**HeadShape(**shape).config, **fields}
    path.joinpath("config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("ignore")  # of some factors transformers says that they are unusual
def test_frequencies_are_those_of_transformers(fields, model_type, tmp_path):
    config = written(tmp_path, fields, model_type=model_type, head_size=64)
    frequencies, scale = read_head_config(tmp_path).rope.frequencies()
    known = {name: value for name, value in config.items() if value is not None}
    rotary = LlamaRotaryEmbedding(CONFIG_MAPPING[model_type].from_dict(known))
    assert torch.equal(frequencies, rotary.inv_freq)
    assert scale == rotary.attention_scaling


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_what_a_config_does_not_say_is_what_transformers_takes_it_for(model_type, tmp_path):
    left_out = ("head_dim", "num_key_value_heads", "rms_norm_eps", "hidden_act", "attention_bias")
    config = written(tmp_path, dict.fromkeys(left_out), model_type=model_type)
    known = {name: value for name, value in config.items() if value is not None}
    theirs = CONFIG_MAPPING[model_type].from_dict(known)
    ours = read_head_config(tmp_path)
    assert ours.head_size == theirs.head_dim
    assert ours.eps == theirs.rms_norm_eps
    assert ours.activation == theirs.hidden_act
    assert ours.has_bias is theirs.attention_bias
    if model_type == "llama":  # Qwen3's own number of 32 is of its 8B model
        assert ours.num_kv_heads == theirs.num_key_value_heads


INVALID = {
    "a config without hidden_size, num_attention_heads": {
        "hidden_size": None,
        "num_attention_heads": None,
    },
    "not valid: intermediate_size is 'x'": {"intermediate_size": "x"},
    "not valid: rms_norm_eps is -1": {"rms_norm_eps": -1},
    "rope scaling of type longrope": {"rope_scaling": {"rope_type": "longrope"}},
    "rope scaling that is not valid.*factor": {"rope_scaling": {"rope_type": "yarn"}},
    "rope scaling that is not valid.*low_freq": {"rope_scaling": {"type": "llama3", "factor": 2}},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "heads of 15 values": {"head_dim": 15},
}


@pytest.mark.parametrize("words", INVALID)
def test_a_layer_that_cannot_be_told_is_refused_by_name(words, tmp_path):
    written(tmp_path, INVALID[words])
    with pytest.raises(ModelUnsupported, match=f"draft head .*{words}"):
        read_head_config(tmp_path)
