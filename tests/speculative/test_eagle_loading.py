"""What heads are taken, as what they are kept, and why others are refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from support.eagle_heads import HeadShape, head_tensors, write_head
from support.eagle_world import (
    BLOCK_SIZE,
    PROMPTS,
    World,
    comparison,
    load_target,
    make_head,
)
from support.tiny_models import make_checkpoint

from plait.platform.config import Options
from plait.platform.errors import ConfigError, ModelUnsupported
from plait.platform.starting.head_loading import find_head, load_drafting_head
from plait.speculative.eagle_config import is_head, read_head_config
from plait.speculative.eagle_head import load_head
from plait.speculative.eagle_weights import Kept


def test_a_head_without_logit_rows_has_the_model_s(target, tmp_path):
    shape = HeadShape()
    tensors = head_tensors(shape, 1)
    known = tensors["d2t"] + torch.arange(shape.draft_vocab_size)
    own = tensors.pop("lm_head.weight")
    path = write_head(tmp_path, shape, tensors)
    rows = target[1].lm_head.weight.detach()[known].float()
    assert rows.shape == own.shape
    world = World(target, path)
    for prompt in PROMPTS:
        world.add(prompt)
    check = comparison(world, shape, {**tensors, "lm_head.weight": rows})
    assert world.run(check) >= 20


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.25)])
def test_matrices_of_a_head_can_be_kept_as_codes(bits, error, target, tmp_path):
    path, shape, _ = make_head(tmp_path)
    heads = [load_head(path, target[0], kept) for kept in (Kept(), Kept(bits=bits))]
    rows = torch.randn(9, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    exact, near = (head.logits(rows) for head in heads)
    assert 0 < (near - exact).norm() / exact.norm() < error
    assert heads[1].weight_bytes < heads[0].weight_bytes


def test_a_head_is_kept_as_the_model_is(target, tmp_path):
    path, *_ = make_head(tmp_path)
    sizes = {}
    for quantization in ("auto", "int8"):
        options = Options(model="x", draft_model=str(path), quantization=quantization)
        sizes[quantization] = load_drafting_head(path, options, target[0]).sizes.weight_bytes
    assert sizes["int8"] == sizes["auto"], "the options are what the model was loaded with"
    (tmp_path / "target").mkdir()
    executor, _ = load_target(tmp_path / "target", quantization="int8")
    loaded = load_drafting_head(path, Options(model="x", draft_model=str(path)), executor)
    assert loaded.sizes.weight_bytes < 0.6 * sizes["auto"]


def test_a_named_head_is_found_and_told_of(target, tmp_path):
    path, *_ = make_head(tmp_path / "a-head")
    options = Options(draft_model=str(path), block_size=BLOCK_SIZE, max_draft_tokens=6)
    assert find_head(options) == path
    loaded = load_drafting_head(path, options, target[0])
    assert loaded.group == 0
    assert loaded.sizes.weight_bytes == loaded.head.weight_bytes
    assert loaded.sizes.bytes_per_block == loaded.head.kv_group.bytes_per_block(BLOCK_SIZE, 4)
    assert loaded.notes == (
        "draft: a-head, an EAGLE-3 head on what layers 2, 3, 4 of the model are given",
        "draft: it knows 120 of 307 tokens, and drafts no others",
    )
    model = make_checkpoint("llama", tmp_path / "model", tokenizer=False)
    assert find_head(replace(options, draft_model=str(model))) is None
    with pytest.raises(ConfigError, match="--draft: there is no file or directory") as refusal:
        find_head(replace(options, draft_model=str(tmp_path / "nothing at all")))
    assert refusal.value.param == "draft_model"
    other = write_head(path, replace(HeadShape(), vocab_size=400), head_tensors(HeadShape()))
    with pytest.raises(ModelUnsupported, match="--draft: the draft head a-head was made for a"):
        load_drafting_head(other, options, target[0])


def test_only_heads_are_taken_for_heads(target, tmp_path):
    path, *_ = make_head(tmp_path / "head")
    assert is_head(path)
    assert is_head(make_head(tmp_path / "other", HeadShape(form="speculators"))[0])
    assert not is_head(make_checkpoint("llama", tmp_path / "model", tokenizer=False))
    assert not is_head(tmp_path / "nothing")


CONFIGS = {
    "EAGLE-3 alone": {"architectures": ["LlamaForCausalLMEagle"]},
    "2 layers": {"num_hidden_layers": 2},
    "layers of deepseek_v3": {"model_type": "deepseek_v3"},
    "rope scaling of type dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "activation relu": {"hidden_act": "relu"},
    "sliding_attention": {"layer_types": ["sliding_attention"]},
    "hidden rows of 128, and": {"target_hidden_size": 128},
    "a vocabulary of 300, and": {"vocab_size": 300},
    r"after 2, 3, 9 layers, and the model has 5": {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]},
    "a config that is not valid": {"eagle_config": "x"},
    "holds None: of such heads": {"architectures": [None]},
    "holds nothing: of such heads": {"architectures": 3},
    "no list of numbers": {"eagle_aux_hidden_state_layer_ids": ["a"]},
    "use_aux_hidden_state": {"eagle_config": {"use_aux_hidden_state": False}},
    r"fc.weight of shape \[64, 192\].*\[64, 128\]": {"eagle_aux_hidden_state_layer_ids": [2, 3]},
}


@pytest.mark.parametrize("words", CONFIGS)
def test_a_head_that_does_not_fit_is_refused_by_name(words, target, tmp_path):
    path, shape, _ = make_head(tmp_path / "a-head")
    (path / "config.json").write_text(json.dumps({**shape.config, **CONFIGS[words]}))
    with pytest.raises(ModelUnsupported, match=f"draft head a-head .*{words}") as refusal:
        load_head(path, target[0])
    assert refusal.value.param == "draft_model"


def _without(name):
    return lambda tensors: tensors.pop(name)


TENSORS = {
    r"lacks midlayer\.|lacks layers\.0\.hidden_norm\.weight \[64\]": _without(
        "layer.hidden_norm.weight"
    ),
    r"lacks d2t \[120\]": _without("d2t"),
    r"no place for: layers\.0\.self_attn\.q_proj\.bias": lambda t: t.update(
        {"layer.self_attn.q_proj.bias": torch.zeros(64)}
    ),
    r"midlayer\.self_attn\.k_proj\.weight of shape \[32, 64\].*\[32, 128\]": lambda t: t.update(
        {"layer.self_attn.k_proj.weight": torch.zeros(32, 64)}
    ),
    r"d2t that does not lead to 120 of 307 tokens": lambda t: (
        t["d2t"].fill_(1).sub_(torch.arange(120))
    ),
}


@pytest.mark.parametrize("words", TENSORS)
def test_weights_that_do_not_fit_are_refused_by_name(words, target, tmp_path):
    shape = HeadShape()
    tensors = head_tensors(shape)
    TENSORS[words](tensors)
    path = write_head(tmp_path / "a-head", shape, tensors)
    with pytest.raises(ModelUnsupported, match=words):
        load_head(path, target[0])


def test_a_head_of_another_width_needs_its_own_embeddings(target, tmp_path):
    shape = HeadShape(hidden_size=48, head_size=12, own_embeddings=False)
    path = write_head(tmp_path, shape, head_tensors(shape))
    with pytest.raises(ModelUnsupported, match=r"no embed_tokens\.weight of its own"):
        load_head(path, target[0])


def test_pickled_weights_are_refused(target, tmp_path):
    path, *_ = make_head(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="pickles"):
        load_head(path, target[0])


def test_layers_are_counted_as_the_form_counts_them(tmp_path):
    """On the top level after how many layers; under eagle_config, where 1 comes first, one less."""
    cases = [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, (1, 2, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, (2, 3, 4)),
        ({}, None),
    ]
    for i, (fields, taps) in enumerate(cases):
        path, shape, _ = make_head(tmp_path / str(i), HeadShape(taps=None))
        (path / "config.json").write_text(json.dumps({**shape.config, **fields}))
        config = read_head_config(path)
        assert config.taps == taps
    assert config.taps_of(32) == (2, 16, 29)


def test_memory_is_told(target, tmp_path):
    path, shape, tensors = make_head(tmp_path)
    head = load_head(path, target[0])
    floats = [t.numel() for name, t in tensors.items() if t.is_floating_point()]
    pads = 8 * 64  # 120 tokens of the head in tiles of 16
    own = shape.draft_vocab_size * shape.hidden_size  # rows of embeddings, beside the whole table
    assert head.weight_bytes == 4 * (sum(floats) + pads + own) + 8 * shape.draft_vocab_size
    assert head.kv_group.bytes_per_block(BLOCK_SIZE, 4) == 2 * 2 * 16 * BLOCK_SIZE * 4


def test_a_truncated_file_is_refused(target, tmp_path):
    path, *_ = make_head(tmp_path)
    save_file({"x": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match="lacks"):
        load_head(path, target[0])
