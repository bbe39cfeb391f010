"""Layer programs beside the torch executor: the same tokens, and the same bits where it is said so.

The table tells which families are lowered, and which give the same bits in fp32: those whose rows
meet the same kernels in both executors. A layer norm of the family's own and an activation without
gate are torch's in the one and ours in the other.
"""

import pytest
import torch
from support.step_driver import StepDriver, Track
from support.tiny_models import FAMILIES, make_checkpoint
from support.tiny_vision import FAMILIES as VISION_FAMILIES
from support.tiny_vision import make_vision_checkpoint
from support.vision_driver import VisionDriver
from support.vision_prompts import make_prompt
from support.vision_tracks import layouts, track_of

from plait.platform.config import Options
from plait.platform.errors import ConfigError
from plait.platform.model import load_model
from plait.platform.model.native.executor import NativeExecutor
from plait.platform.model.native.instructions import CallOp
from plait.platform.model.native.reference import ReferenceRunner

EXACT, ROUNDED = "the same bits", "layer norms or plain activations round otherwise"
LOWERED = {
    "llama": EXACT,
    "mistral": EXACT,
    "qwen2": EXACT,
    "qwen3": EXACT,
    "qwen3_moe": EXACT,
    "gemma2": EXACT,
    "gemma3": EXACT,
    "phi3": EXACT,
    "smollm3": EXACT,
    "olmo2": EXACT,
    "granite": EXACT,
    "mixtral": EXACT,
    "gpt_oss": EXACT,
    "cohere2": ROUNDED,
    "starcoder2": ROUNDED,
    "gpt_neox": ROUNDED,
    "gpt2": ROUNDED,
}
NOT_LOWERED = {
    "deepseek_v3": "kv_b_proj: takes",
}
ROUNDED_VISION = {"aya_vision", "cohere2_vision"}
PROMPTS = ((45, 0), (13, 2), (30, 3))  # (tokens, step at which the sequence joins)


def load(directory, executor, dtype="float32", **options):
    return load_model(
        Options(
            model=str(directory),
            dtype=dtype,
            executor=executor,
            num_threads=1,
            progress=False,
            **options,
        )
    )


def random_tracks():
    generator = torch.Generator().manual_seed(1)
    return [
        Track(torch.randint(5, 300, (n,), generator=generator).tolist(), 32, start_step=s)
        for n, s in PROMPTS
    ]


def check_same(ours, theirs, *, is_exact):
    for one, other in zip(ours, theirs, strict=True):
        assert one.output == other.output
        hidden, wanted = torch.stack(one.hidden), torch.stack(other.hidden)
        if is_exact:
            assert torch.equal(hidden, wanted)
        else:
            torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)


def test_the_table_names_every_family():
    assert set(LOWERED) | set(NOT_LOWERED) == set(FAMILIES)


@pytest.mark.parametrize("family", LOWERED)
def test_tokens_and_hidden_rows_equal_the_torch_executors(family, tmp_path):
    directory = make_checkpoint(family, tmp_path)
    native = load(directory, "native").executor
    assert isinstance(native, NativeExecutor)
    assert native.model.executor == "native"
    assert native.agreement.is_exact or LOWERED[family] == ROUNDED
    ours, theirs = random_tracks(), random_tracks()
    StepDriver(native).run(ours)
    StepDriver(load(directory, "torch").executor).run(theirs)
    check_same(ours, theirs, is_exact=LOWERED[family] == EXACT)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "cohere2", "qwen3_moe", "gpt_oss"])
def test_bits_equal_the_torch_executors_in_bfloat16_too(family, tmp_path):
    """These families round where the program does."""
    directory = make_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    native = load(directory, "native", "bfloat16").executor
    ours, theirs = random_tracks(), random_tracks()
    StepDriver(native).run(ours)
    StepDriver(load(directory, "torch", "bfloat16").executor).run(theirs)
    check_same(ours, theirs, is_exact=True)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_prompts_with_images_equal_the_torch_executors(family, tmp_path):
    model = make_vision_checkpoint(family, tmp_path)
    prompts = [make_prompt(family, model, parts, seed=i) for i, parts in enumerate(layouts(family))]
    found = []
    for kind in ("native", "torch"):
        tracks = [track_of(model, prompt, start_step=i) for i, prompt in enumerate(prompts)]
        VisionDriver(load(tmp_path, kind).executor).run(tracks)
        found.append(tracks)
    check_same(*found, is_exact=family not in ROUNDED_VISION)


@pytest.mark.parametrize("family", NOT_LOWERED)
def test_what_cannot_be_lowered_is_refused_by_name_or_noted(family, tmp_path):
    directory = make_checkpoint(family, tmp_path)
    with pytest.raises(ConfigError, match=NOT_LOWERED[family]) as refused:
        load(directory, "native")
    assert "layers.0." in refused.value.message
    loaded = load(directory, "auto")
    assert loaded.info.executor == "torch"
    assert any(NOT_LOWERED[family] in note for note in loaded.info.notes)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "granite", "gpt2"])
def test_the_reference_runs_the_same_program_to_the_same_rows(family, tmp_path):
    """Two implementations of the instructions: the runner in C++ and the one in plain torch."""
    native = load(make_checkpoint(family, tmp_path), "native").executor
    ours, theirs = random_tracks(), random_tracks()
    StepDriver(native).run(ours)
    native.runner = ReferenceRunner(native.lowered.program)
    StepDriver(native).run(theirs)
    check_same(ours, theirs, is_exact=LOWERED[family] == EXACT)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("mixtral", {"num_key_value_heads": 1}),
    ],
    ids=["linear-rope", "biases", "three-heads", "partial-rotary", "some-windows", "one-kv-head"],
)
def test_variants_equal_the_torch_executors(family, fields, tmp_path):
    directory = make_checkpoint(family, tmp_path, **fields)
    ours, theirs = random_tracks(), random_tracks()
    StepDriver(load(directory, "native").executor).run(ours)
    StepDriver(load(directory, "torch").executor).run(theirs)
    check_same(ours, theirs, is_exact=True)


def test_experts_are_called_and_the_rest_is_not(tmp_path):
    native = load(make_checkpoint("qwen3_moe", tmp_path), "native").executor
    called = [op.name for op in native.lowered.program.code if isinstance(op, CallOp)]
    assert called == ["layers.0.mlp", "layers.2.mlp"]  # layer 1 has a plain MLP


def test_rows_tapped_between_layers_are_the_torch_executors(tmp_path):
    directory = make_checkpoint("granite", tmp_path)
    found = []
    for kind in ("native", "torch"):
        executor = load(directory, kind).executor
        driver = StepDriver(executor)
        batch = driver._batch([Track(list(range(5, 20)), 1)], [15])
        found.append(executor.forward_tapped(batch, (3, 0, 1, 1)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_weights_give_the_torch_executors_bits(bits, activations, dtype, tmp_path):
    directory = make_checkpoint("qwen3", tmp_path, hidden_size=128, intermediate_size=192)
    found = []
    for kind in ("native", "torch"):
        options = {"quantization": bits, "quantized_activations": activations}
        tracks = random_tracks()[:2]
        StepDriver(load(directory, kind, dtype, packed_cache="off", **options).executor).run(tracks)
        found.append(tracks)
    check_same(*found, is_exact=True)
