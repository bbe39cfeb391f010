"""Packed weights on disk: a warm start is the same model, and nothing of the disk can hurt it."""

import os
import threading

import pytest
import torch
from support.step_driver import StepDriver, Track
from support.tiny_vision import make_vision_checkpoint

from plait.platform.config import Options
from plait.platform.model import kept_weights, load_model, packed_cache
from plait.platform.model.build import build_skeleton, prepare
from plait.platform.model.filling import kept_values, put_values, read_weights
from plait.platform.model.packed_cache import PackedCache
from plait.platform.model.packed_file import open_packed, write_packed
from plait.platform.model.source import find_checkpoint
from plait.platform.model.tensor_files import SafetensorsFiles


@pytest.fixture(autouse=True)
def cache_tiny_models(monkeypatch):
    monkeypatch.setattr(kept_weights, "MIN_BYTES", 0)


def load(directory, folder, **options):
    given = Options(model=str(directory), progress=False, packed_cache=str(folder), **options)
    return load_model(given)


def logprobs(loaded):
    track = Track(list(range(5, 25)), num_output=1)
    StepDriver(loaded.executor).run([track])
    return torch.stack(track.logprobs)


def is_warm(loaded):
    return loaded.info.weights_from.startswith("packed before")


def weights_of(folder):
    return sorted(folder.glob("*.weights"))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16", "quantization": "int4"}),
        ("qwen2", {"quantization": "int8"}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"quantization": "int4"}),
        ("gpt2", {"quantization": "int8"}),
        ("gemma2", {}),
    ],
)
def test_a_warm_start_reads_no_weights_and_gives_the_same_bits(
    family, options, tmp_path, checkpoint, monkeypatch
):
    cold = load(checkpoint(family), tmp_path, **options)
    assert not is_warm(cold)
    monkeypatch.setattr(SafetensorsFiles, "read", None)
    warm = load(checkpoint(family), tmp_path, **options)
    assert is_warm(warm)
    torch.testing.assert_close(logprobs(warm), logprobs(cold), rtol=0, atol=0)


def test_what_weights_depend_on_is_in_their_key(tmp_path, checkpoint):
    for options in (
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int8", "quantized_activations": "exact"},
        {"dtype": "bfloat16", "quantization": "int4"},
    ):
        assert not is_warm(load(checkpoint("llama"), tmp_path, **options))
    assert not is_warm(load(checkpoint("mistral"), tmp_path, dtype="float32"))
    assert len(weights_of(tmp_path)) == 6
    assert is_warm(load(checkpoint("llama"), tmp_path, dtype="float32"))


def test_a_checkpoint_that_changed_is_read_again(tmp_path, checkpoint):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint("llama").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    load(copy, tmp_path / "cache")
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert not is_warm(load(copy, tmp_path / "cache"))
    elsewhere = copy.rename(tmp_path / "elsewhere")
    assert is_warm(load(elsewhere, tmp_path / "cache")), "content counts, not its place"


@pytest.mark.parametrize("damage", ["flip", "cut", "header", "empty"])
def test_damaged_files_are_made_anew(damage, tmp_path, checkpoint):
    wanted = logprobs(load(checkpoint("llama"), tmp_path))
    (path,) = weights_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[{"flip": len(data) - 100, "header": 200}.get(damage, 0)] ^= 1
    data = data[: {"cut": len(data) - 64, "empty": 0}.get(damage, len(data))]
    path.write_bytes(data)
    again = load(checkpoint("llama"), tmp_path)
    assert not is_warm(again)
    torch.testing.assert_close(logprobs(again), wanted, rtol=0, atol=0)
    assert is_warm(load(checkpoint("llama"), tmp_path))


def test_a_whole_file_without_its_seal_is_verified_and_used(tmp_path, checkpoint):
    load(checkpoint("llama"), tmp_path)
    (path,) = weights_of(tmp_path)
    path.with_suffix(".seal").unlink()
    os.utime(path, (1, 1))
    assert is_warm(load(checkpoint("llama"), tmp_path))
    assert path.with_suffix(".seal").exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, checkpoint):
    (tmp_path / "file").write_text("not a folder")
    for _ in range(2):
        assert not is_warm(load(checkpoint("llama"), tmp_path / "file" / "cache"))


def test_off_keeps_nothing(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load(checkpoint("llama"), "off")
    assert not list(tmp_path.iterdir())
    load_model(Options(model=str(checkpoint("llama")), progress=False))
    assert weights_of(tmp_path / "plait" / "weights")


def test_the_longest_unused_go_first(tmp_path, checkpoint):
    budget = 0
    for family in ("llama", "mistral", "qwen3"):
        budget += load(checkpoint(family), tmp_path).info.weight_bytes
        names = {path.name for path in weights_of(tmp_path)}
    assert len(names) == 3
    assert is_warm(load(checkpoint("llama"), tmp_path))  # used now; mistral is the oldest
    load(checkpoint("olmo2"), tmp_path, packed_cache_bytes=budget)
    assert is_warm(load(checkpoint("llama"), tmp_path))
    assert not is_warm(load(checkpoint("mistral"), tmp_path))


def test_two_at_once_leave_one_whole_file(tmp_path, checkpoint):
    options = Options(model=str(checkpoint("llama")), progress=False)
    values = list(kept_values(_filled(options)))
    cache = PackedCache(tmp_path / "cache", 1 << 30)
    threads = [
        threading.Thread(target=cache.save, args=("ab", 1000, values), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = weights_of(tmp_path / "cache")
    found = open_packed(path, verify=True).values
    assert found.keys() == dict(values).keys()
    assert not list((tmp_path / "cache").glob("*.part"))


def test_weights_are_mapped_where_memory_is_short_and_the_same(tmp_path, checkpoint, monkeypatch):
    load(checkpoint("llama"), tmp_path)
    copied = load(checkpoint("llama"), tmp_path)
    monkeypatch.setattr(packed_cache, "available_bytes", lambda: 0)
    mapped = load(checkpoint("llama"), tmp_path)
    assert copied.info.mapped_bytes == 0 < mapped.info.mapped_bytes
    assert mapped.info.weights_from.startswith("mapped")
    assert torch.equal(logprobs(copied), logprobs(mapped))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_towers_come_back_too(family, tmp_path):
    make_vision_checkpoint(family, tmp_path / "model")
    options = Options(model=str(tmp_path / "model"), progress=False)
    values = dict(kept_values(_filled(options)))
    with (tmp_path / "file").open("xb") as file:
        write_packed(file, values.items())
    fresh = _skeleton(options)
    put_values(fresh, open_packed(tmp_path / "file", verify=True).values)
    again = dict(kept_values(fresh))
    assert again.keys() == values.keys()
    for name, value in values.items():
        wanted = value if isinstance(value, torch.Tensor) else value.tiles
        got = again[name] if isinstance(value, torch.Tensor) else again[name].tiles
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def _skeleton(options):
    skeleton = build_skeleton(find_checkpoint(options), torch.float32, options)
    prepare(skeleton, max_model_len=128)
    return skeleton


def _filled(options):
    skeleton = _skeleton(options)
    read_weights(skeleton, lambda: None)
    return skeleton
