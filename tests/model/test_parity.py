"""transformers is the oracle: same greedy tokens and log-probabilities, family by family."""

import pytest
import torch
from support.step_driver import StepDriver, Track
from support.tiny_models import FAMILIES, make_checkpoint
from transformers import AutoModelForCausalLM

from plait.platform.config import Options
from plait.platform.model import load_model

NUM_OUTPUT = 32
# Windows of the tiny models are 12 and 20 tokens: the first prompt outgrows both.
PROMPTS = ((45, 0), (13, 2), (30, 3))  # (tokens, step at which the sequence joins)


def random_tracks(num_output=NUM_OUTPUT):
    generator = torch.Generator().manual_seed(1)
    return [
        Track(torch.randint(5, 300, (n,), generator=generator).tolist(), num_output, start_step=s)
        for n, s in PROMPTS
    ]


@torch.no_grad()
def reference_logprobs(model, tokens):
    """Log-probabilities of every position, by the family's own forward on the whole sequence."""
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def check_against(reference, tracks, tolerance):
    for track in tracks:
        wanted = reference_logprobs(reference, track.tokens)
        got = torch.stack(track.logprobs)
        torch.testing.assert_close(got, wanted[: len(got)], rtol=0, atol=tolerance)
        greedy = wanted[-NUM_OUTPUT - 1 : -1].argmax(-1).tolist()
        assert track.output == greedy


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_equal_transformers(family, tmp_path):
    directory = make_checkpoint(family, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    executor = load_model(Options(model=str(directory), dtype="float32")).executor
    tracks = random_tracks()
    StepDriver(executor).run(tracks)
    check_against(reference, tracks, tolerance=1e-4)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ],
    ids=[
        "linear-rope",
        "yarn",
        "dynamic-rope",
        "biases-and-tied",
        "sequential-residual",
        "window-on-some-layers",
    ],
)
def test_variants_equal_transformers(family, fields, tmp_path):
    directory = make_checkpoint(family, tmp_path, **fields)
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    executor = load_model(Options(model=str(directory), dtype="float32")).executor
    tracks = random_tracks()
    StepDriver(executor).run(tracks)
    check_against(reference, tracks, tolerance=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_bfloat16_stays_near_float32(family, tmp_path):
    """No token parity in bf16 (rounding decides near-ties), but the distribution must agree."""
    directory = make_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    loaded = load_model(Options(model=str(directory), dtype="bfloat16"))
    assert loaded.executor.kv_dtype == "bfloat16"
    tracks = random_tracks(num_output=1)
    StepDriver(loaded.executor).run(tracks)
    for track in tracks:
        wanted = reference_logprobs(reference, track.tokens)[: len(track.logprobs)]
        off = (torch.stack(track.logprobs) - wanted).abs()
        # Rounding to 8 bits at some hundred places; a wrong layer is off by one and more.
        assert off.mean() < 0.06


def test_longrope_uses_long_factors_where_the_served_context_is_long(tmp_path):
    """Transformers switches by the longest position of a forward; we fix the choice at load."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
        "original_max_position_embeddings": 32,
    }
    fields = {"rope_parameters": rope, "original_max_position_embeddings": 32}
    directory = make_checkpoint("phi3", tmp_path, sliding_window=None, **fields)
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    for served, notes in ((None, "long factors"), (32, "short factors")):
        loaded = load_model(Options(model=str(directory), max_model_len=served, dtype="float32"))
        assert any(notes in note for note in loaded.info.notes)
        length = 60 if served is None else 20  # a lone forward of this length makes the same choice
        track = Track(list(range(5, 5 + length)), num_output=4)
        StepDriver(loaded.executor).run([track])
        wanted = reference_logprobs(reference, track.tokens)[: len(track.logprobs)]
        torch.testing.assert_close(torch.stack(track.logprobs), wanted, rtol=0, atol=1e-4)
