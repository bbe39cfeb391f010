"""Models that we would serve wrongly are refused by name, before a weight is read."""

import pytest
import torch
import transformers
from support.tiny_models import make_checkpoint, rewrite_config

from plait.platform.config import Options
from plait.platform.errors import ModelUnsupported
from plait.platform.model import check_model, load_model

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def save(directory, model_class, config):
    torch.manual_seed(0)
    getattr(transformers, model_class)(config).save_pretrained(directory)
    return directory


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
          "num_hidden_layers": 1, "vocab_size": 64}  # fmt: skip


def reason(directory):
    report = check_model(Options(model=str(directory)))
    assert not report.servable
    with pytest.raises(ModelUnsupported) as caught:
        load_model(Options(model=str(directory)))
    assert caught.value.message == report.reason
    return report.reason


@pytest.mark.parametrize(
    ("model_class", "config", "words"),
    [
        ("MambaForCausalLM", transformers.MambaConfig(**SMALL, state_size=4), "Mamba"),
        (
            "T5ForConditionalGeneration",
            transformers.T5Config(
                vocab_size=64, d_model=32, d_ff=32, num_layers=1, d_kv=16, num_heads=2
            ),
            "encoder-decoder",
        ),
        (
            "BloomForCausalLM",
            transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2),
            "Bloom",
        ),
        ("FalconForCausalLM", transformers.FalconConfig(**SMALL, alibi=True), "Falcon"),
        (
            "BertForMaskedLM",
            transformers.BertConfig(**SMALL, intermediate_size=32),
            "BertForMaskedLM",
        ),
        (
            "RecurrentGemmaForCausalLM",
            transformers.RecurrentGemmaConfig(**SMALL, intermediate_size=96, num_key_value_heads=1),
            "RecurrentGemma",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused_by_name(model_class, config, words, tmp_path):
    assert words in reason(save(tmp_path, model_class, config))


@pytest.mark.parametrize("field", ["architectures", "text_config"])
def test_a_field_of_another_form_is_refused_by_name(field, tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    rewrite_config(directory, **{field: 1})
    assert f"{field} is 1" in reason(directory)


def test_a_headless_checkpoint_is_refused(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    rewrite_config(directory, architectures=["LlamaForSequenceClassification"])
    assert "LlamaForSequenceClassification" in reason(directory)


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    (directory / "evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    rewrite_config(directory, auto_map=auto_map)
    info = load_model(Options(model=str(directory))).info
    assert any("is not run" in note for note in info.notes)
    rewrite_config(directory, model_type="evil")
    assert "code from a checkpoint is never run" in reason(directory)


def test_quantized_checkpoints_name_their_method(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    rewrite_config(directory, quantization_config={"quant_method": "hqq"})
    assert "quantised with hqq" in reason(directory)


def test_other_vision_models_say_so(tmp_path):
    transformers.Blip2Config(architectures=["Blip2ForConditionalGeneration"]).save_pretrained(
        tmp_path
    )
    assert "Blip2ForConditionalGeneration takes images" in reason(tmp_path)


def test_a_vision_model_whose_language_model_is_not_served_says_why(tmp_path):
    config = transformers.Lfm2VlConfig(
        text_config={"model_type": "lfm2", **_SMALL, "layer_types": ["conv"]},
        vision_config={"model_type": "siglip2_vision_model", "vision_use_head": False, **_SMALL},
    )
    transformers.Lfm2VlForConditionalGeneration(config).save_pretrained(tmp_path)
    assert "layers of type conv" in reason(tmp_path)


def test_a_tower_whose_attention_goes_its_own_way_is_refused_by_name(tmp_path):
    """SigLIP's pooling head attends by torch's own module."""
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_SMALL},
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": True, **_SMALL},
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    assert "MultiheadAttention of its tower" in reason(tmp_path)


def test_a_text_model_inside_a_wrapper_counts_as_the_wrapper(tmp_path):
    """Fuyu's config names no vision part, only the text model that it wraps."""
    config = transformers.FuyuConfig(architectures=["FuyuForCausalLM"])
    config.save_pretrained(tmp_path)
    assert "FuyuForCausalLM takes images or other inputs" in reason(tmp_path)


def test_an_unknown_model_type_is_named(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    rewrite_config(directory, model_type="starship")
    assert "'starship'" in reason(directory)


def test_rope_that_changes_with_length_in_some_layers_is_refused(tmp_path):
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    changing = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    rope = {"full_attention": changing, "sliding_attention": plain}
    directory = make_checkpoint("gemma3", tmp_path, rope_parameters=rope)
    assert "that change with length are not served" in reason(directory)


def test_attention_of_its_own_is_the_reason_given(tmp_path):
    config = transformers.FalconConfig(**SMALL)
    assert "attentions of its own" in reason(save(tmp_path, "FalconForCausalLM", config))


def test_the_part_that_fails_is_named(tmp_path):
    config = transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, intermediate_size=32, kv_channels=16
    )
    assert "JetMoeTopKGating cannot be run" in reason(save(tmp_path, "JetMoeForCausalLM", config))
