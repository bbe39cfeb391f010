"""A start from a stored program is the same model, and starts anew when anything changed."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from support.adapter_driver import place
from support.peft_adapters import fill_adapter, quiet
from support.step_driver import StepDriver, Track
from support.tiny_models import make_checkpoint
from support.tiny_vision import make_vision_checkpoint
from support.vision_prompts import make_prompt

from plait import LLM, SamplingParams
from plait.platform.config import Options
from plait.platform.core import AdapterUse
from plait.platform.model import kept_weights, load, load_model, stored_tower, warm_start
from plait.platform.model.native.executor import NativeExecutor
from plait.platform.model.vision import rows_of

GENERATION = "a" * 64


def save_adapter(model, directory, **config):
    from peft import LoraConfig, get_peft_model

    with quiet():
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **config))
        fill_adapter(adapted, seed=0, strength=0.5)
        adapted.save_pretrained(directory)


@pytest.fixture(autouse=True)
def cache_tiny_models(monkeypatch):
    monkeypatch.setattr(kept_weights, "MIN_BYTES", 0)


@pytest.fixture
def fresh(monkeypatch):
    """Names of the models that were loaded in their family's own class."""
    found = []
    load_fresh = load.load_fresh

    def loads(options, located):
        found.append(located.name)
        return load_fresh(options, located)

    monkeypatch.setattr(load, "load_fresh", loads)
    return found


def start(directory, folder, **options):
    return load_model(
        Options(model=str(directory), progress=False, packed_cache=str(folder), **options)
    )


def answer(loaded):
    tracks = [Track(list(range(5, 5 + n)), num_output=8) for n in (3, 40)]
    StepDriver(loaded.executor).run(tracks)
    return [t.output for t in tracks], torch.cat([torch.stack(t.logprobs) for t in tracks])


STORED = [
    ("llama", {"dtype": "float32"}),
    ("llama", {"dtype": "bfloat16"}),
    ("mistral", {"quantization": "int8"}),
    ("qwen2", {"dtype": "bfloat16", "quantization": "int4"}),
    ("qwen3", {"max_model_len": 100}),
    ("olmo2", {}),
    ("smollm3", {}),
    ("phi3", {}),
    ("gpt_neox", {}),
    ("starcoder2", {}),
]
NOT_STORED = {
    "gemma2": "an embedding that does more than gather",
    "granite": "a head that does more than multiply",
    "qwen3_moe": "is no linear layer",
    "gpt2": "by their positions",
}


@pytest.mark.parametrize(("family", "options"), STORED)
def test_a_later_start_gives_the_same_bits(family, options, tmp_path, fresh):
    directory = make_checkpoint(family, tmp_path / "model")
    first, later = (start(directory, tmp_path / "cache", **options) for _ in range(2))
    assert len(fresh) == 1
    assert isinstance(later.executor, NativeExecutor)
    tokens, logprobs = answer(first)
    again, same = answer(later)
    assert tokens == again
    assert torch.equal(logprobs, same)
    origin = {"weights_from": "", "mapped_bytes": 0}
    assert dataclasses.replace(first.info, **origin) == dataclasses.replace(later.info, **origin)
    assert later.executor.sites == first.executor.sites
    assert later.num_parameters == first.num_parameters


@pytest.mark.parametrize("family", NOT_STORED)
def test_what_has_no_plain_form_starts_as_the_first_time(family, tmp_path, fresh, caplog):
    caplog.set_level("INFO")
    directory = make_checkpoint(family, tmp_path / "model")
    first, later = (start(directory, tmp_path / "cache") for _ in range(2))
    assert len(fresh) == 2
    assert NOT_STORED[family] in caplog.text
    assert answer(first)[0] == answer(later)[0]


@pytest.mark.parametrize("has_adapter", [False, True])
def test_recorded_towers_give_the_same(has_adapter, tmp_path, fresh):
    model = make_vision_checkpoint("llava", tmp_path / "model")
    prompt = make_prompt("llava", model, (3, (2, 2), 4))
    if has_adapter:
        targets = ["q_proj", "v_proj", "fc1", "linear_2"]
        save_adapter(model, tmp_path / "adapter", target_modules=targets)
    uses = [(AdapterUse(generation=GENERATION),)] if has_adapter else []
    embeds, outputs = [], []
    for _ in range(2):
        executor = start(tmp_path / "model", tmp_path / "cache", dtype="float32").executor
        track = Track(list(range(5, 25)), num_output=4)
        StepDriver(executor).run([track])
        if has_adapter:
            place(executor, tmp_path / "adapter", GENERATION)
        with torch.inference_mode():  # as within a step
            embeds.append(executor.encode(prompt.items, uses)[0])
        outputs.append(track.output)
    assert len(fresh) == 1
    assert executor.is_vision_stored
    assert torch.equal(*embeds)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llava", "paligemma", "gemma3", "internvl", "aya_vision"])
def test_towers_give_the_same_whether_recorded_or_not(family, dtype, tmp_path, caplog):
    """Images alone and in a batch, whatever of it a family's text lets a start keep."""
    model = make_vision_checkpoint(family, tmp_path / "model")
    prompts = [make_prompt(family, model, (3, (2, 2), 4), seed=seed) for seed in range(3)]
    items = [item for prompt in prompts for item in prompt.items]
    first, later = (start(tmp_path / "model", tmp_path / "cache", dtype=dtype) for _ in range(2))
    with torch.inference_mode():
        wanted = first.executor.encode(items, ())
        found = [*later.executor.encode(items[:1], ()), *later.executor.encode(items[1:], ())]
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    if family == "llava":
        assert later.executor.is_vision_stored
    assert "differs from its class" not in caplog.text


def test_images_of_another_shape_or_dtype_are_given_to_the_class(tmp_path):
    make_vision_checkpoint("llava", tmp_path / "model")
    first, later = (start(tmp_path / "model", tmp_path / "cache") for _ in range(2))
    root, own = later.executor.open_vision().root, first.executor.open_vision().root
    _, side, _ = root._shape
    images = torch.rand(2, 3, side, side, dtype=torch.float64)
    with torch.inference_mode():
        wanted = own.get_image_features(pixel_values=images, return_dict=True)
        assert root._class is None
        found = root.get_image_features(pixel_values=images)
        assert root._class is not None
        assert torch.equal(rows_of(found.pooler_output), rows_of(wanted.pooler_output))
        for tower in (own, root):
            with pytest.raises(ValueError, match="doesn't match model"):
                tower.get_image_features(pixel_values=torch.rand(1, 3, side, 2 * side))


@pytest.mark.parametrize("why", ["a large tower", "differs from its class"])
def test_a_tower_that_cannot_be_kept_is_built_later(why, tmp_path, fresh, caplog, monkeypatch):
    caplog.set_level("INFO")
    if why == "a large tower":
        monkeypatch.setattr(stored_tower, "_MOST_FLOP", 1)
    else:
        monkeypatch.setattr(warm_start, "same_tower", lambda *_: False)
    model = make_vision_checkpoint("llava", tmp_path / "model")
    prompt = make_prompt("llava", model, (3, (2, 2), 4))
    first, later = (start(tmp_path / "model", tmp_path / "cache") for _ in range(2))
    assert why in caplog.text
    assert len(fresh) == 1
    assert not later.executor.is_vision_stored
    with torch.inference_mode():
        (wanted,), (found,) = (s.executor.encode(prompt.items, ()) for s in (first, later))
    assert torch.equal(wanted, found)


def test_any_change_starts_anew(tmp_path, fresh, monkeypatch):
    directory = make_checkpoint("llama", tmp_path / "model")
    folder = tmp_path / "cache"

    def is_fresh(**options):
        fresh.clear()
        start(directory, folder, **options)
        return bool(fresh)

    assert is_fresh()
    assert not is_fresh()
    assert is_fresh(dtype="bfloat16")
    assert is_fresh(max_model_len=99)
    assert is_fresh(served_model_name="other")
    assert is_fresh(quantization="int8")
    assert is_fresh(executor="torch")
    assert not is_fresh(num_threads=2, block_size=32, memory_utilization=0.5)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    assert is_fresh()
    (directory / "generation_config.json").write_text('{"eos_token_id": 8}')
    assert is_fresh()
    assert not is_fresh()
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (directory / "model.safetensors").write_bytes(weights)
    assert is_fresh()
    for name, changed in (("_code", lambda: ["another"]), ("_machine", lambda: ["another"])):
        with monkeypatch.context() as patch:
            patch.setattr(warm_start, name, changed)
            assert is_fresh()
        assert not is_fresh()


def test_the_code_of_a_family_is_looked_at_too(tmp_path, fresh, monkeypatch):
    directory = make_checkpoint("llama", tmp_path / "model")
    start(directory, tmp_path / "cache")
    monkeypatch.setattr(warm_start, "has_changed", lambda files: "modeling_llama" in str(files))
    start(directory, tmp_path / "cache")
    assert len(fresh) == 2


@pytest.mark.parametrize("lost", ["*.start", "*.weights"])
@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_what_is_lost_is_made_again(lost, how, tmp_path, fresh):
    directory = make_checkpoint("llama", tmp_path / "model")
    wanted = answer(start(directory, tmp_path / "cache"))[0]
    (path,) = (tmp_path / "cache").glob(lost)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert answer(start(directory, tmp_path / "cache"))[0] == wanted
    assert len(fresh) == 2
    start(directory, tmp_path / "cache")
    assert len(fresh) == 2


def test_every_option_is_in_the_key_or_known_to_change_nothing():
    names = {f.name for f in dataclasses.fields(Options)}
    assert names >= warm_start.WITHOUT_EFFECT
    assert names - warm_start.WITHOUT_EFFECT == {
        "served_model_name", "dtype", "quantization", "quantized_activations", "executor", "device",
        "max_model_len",
    }  # fmt: skip


HEAVY = ("transformers", "sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")
LATER = """
import sys
from plait import LLM, SamplingParams

llm = LLM(sys.argv[1], packed_cache=sys.argv[2], max_model_len=64, num_threads=1, progress=False)
print(llm.generate("Hello", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids)
print(sorted(name for name in sys.argv[3:] if name in sys.modules))
"""


def test_a_later_start_imports_no_transformers(tmp_path):
    directory = str(make_checkpoint("llama", tmp_path / "model"))
    cache = str(tmp_path / "cache")
    with LLM(directory, packed_cache=cache, max_model_len=64, num_threads=1, progress=False) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4)
        first = llm.generate("Hello", greedy)[0].outputs[0].token_ids
    said = subprocess.run(
        [sys.executable, "-c", LATER, directory, cache, *HEAVY],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said == [str(first), "[]"]


SEEING = """
import sys
import torch
from plait.platform.config import Options
from plait.platform.model import load_model

loaded = load_model(Options(model=sys.argv[1], packed_cache=sys.argv[2], progress=False))
root = loaded.executor.open_vision().root
with torch.inference_mode():
    rows = root.get_image_features(pixel_values=torch.zeros(1, *root._shape, dtype=root._dtype))
print(len(rows.pooler_output) > 0)
print(sorted(name for name in sys.argv[3:] if name in sys.modules))
"""


def test_the_first_image_of_a_later_start_brings_no_transformers(tmp_path):
    make_vision_checkpoint("llava", tmp_path / "model")
    directory, cache = str(tmp_path / "model"), str(tmp_path / "cache")
    start(directory, cache)
    said = subprocess.run(
        [sys.executable, "-c", SEEING, directory, cache, *HEAVY],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said == ["True", "[]"]
