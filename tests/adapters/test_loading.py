"""Loading from the store: limits, what was tampered with, and places that are named twice."""

import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapter_sites import sites_of
from support.peft_adapters import EXPERT_KINDS, load_base, make_adapter, make_kind
from support.tiny_models import make_checkpoint

from plait.adapters.loading import inspect_adapter, load_adapter
from plait.adapters.store import AdapterStore
from plait.platform.errors import (
    AdapterRankExceeded,
    AdapterStorageFailed,
    InvalidAdapter,
)

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    checkpoint = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), tokenizer=False)
    return checkpoint, sites_of(load_base(checkpoint))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe")
    checkpoint = make_checkpoint("qwen3_moe", directory, tokenizer=False, num_experts=3)
    return checkpoint, sites_of(load_base(checkpoint))


def test_a_rank_above_the_limit_is_an_error_of_its_own(llama, moe, tmp_path):
    directory = make_kind("patterns", llama[0], tmp_path / "a")
    with pytest.raises(AdapterRankExceeded, match="limit of 6"):
        load_adapter("g", directory, llama[1], max_rank=6)
    assert load_adapter("g", directory, llama[1], max_rank=7).low_rank
    directory = make_adapter(moe[0], tmp_path / "b", **EXPERT_KINDS["experts"])
    with pytest.raises(AdapterRankExceeded, match="limit of 1"):
        load_adapter("g", directory, moe[1], max_rank=1)


def test_what_is_loaded_is_what_was_stored(llama, tmp_path):
    store = AdapterStore(tmp_path / "store")
    source = make_kind("linear", llama[0], tmp_path / "source", seed=3)
    (source / "plait_adapter.json").write_text('{"stop": "x"}')
    stored = store.add_directory(source)
    adapter = load_adapter(stored.generation, stored.directory, llama[1], max_rank=8)
    looked_at = inspect_adapter(source, llama[1], max_rank=8)
    assert adapter.generation == looked_at.generation == stored.generation
    assert adapter.info.report.num_tensors == len(load_file(source / WEIGHTS))
    for name in (WEIGHTS, "plait_adapter.json"):
        path = stored.directory / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if name == WEIGHTS else b"{}")
        with pytest.raises(AdapterStorageFailed, match="load it again"):
            load_adapter(stored.generation, stored.directory, llama[1], max_rank=8)
        path.write_bytes(whole)
    (stored.directory / WEIGHTS).unlink()
    for _ in ("a file is gone", "all is gone"):
        with pytest.raises(AdapterStorageFailed, match="no longer there"):
            load_adapter(stored.generation, stored.directory, llama[1], max_rank=8)
        shutil.rmtree(stored.directory, ignore_errors=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_keep_the_dtype_of_their_file(llama, tmp_path, dtype):
    directory = make_adapter(
        llama[0], tmp_path, dtype=dtype, r=3, target_modules=["q_proj"], lora_bias=True
    )
    adapter = load_adapter("g", directory, llama[1], max_rank=8)
    tensors = [t for p in adapter.low_rank for t in (p.a, p.b, p.b_bias)]
    assert {t.dtype for t in tensors} == {dtype}
    assert adapter.info.num_bytes == sum(t.nbytes for t in tensors)
    # The PEFT file has a bias of zeros for each; the sizes are those of the file.
    assert sum(t.nbytes for t in load_file(directory / WEIGHTS).values()) == adapter.info.num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_found_in_every_dtype(llama, tmp_path, dtype, value):
    directory = make_adapter(llama[0], tmp_path, dtype=dtype, r=3, target_modules=["q_proj"])
    tensors = load_file(directory / WEIGHTS)
    name = sorted(tensors)[3]
    tensors[name][-1, -1] = value
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(InvalidAdapter) as caught:
        load_adapter("g", directory, llama[1], max_rank=8)
    assert caught.value.report.not_finite == (name,)
    tensors[name][-1, -1] = -min(1e30, torch.finfo(dtype).max)  # large, and a number
    save_file(tensors, directory / WEIGHTS)
    report = load_adapter("g", directory, llama[1], max_rank=8).info.report
    assert max(site.change_norm for site in report.sites) < float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_that_no_number_holds_is_refused_by_its_site(llama, tmp_path, dtype):
    directory = make_adapter(llama[0], tmp_path, dtype=dtype, r=3, target_modules=["q_proj"])
    tensors = load_file(directory / WEIGHTS)
    for name in sorted(tensors)[2:4]:  # the second layer's A and B
        tensors[name].fill_(1e30)
    save_file(tensors, directory / WEIGHTS)
    words = r"layers\.1\.self_attn\.q_proj has the norm .*A has values up to 1e\+30"
    with pytest.raises(InvalidAdapter, match=words):
        load_adapter("g", directory, llama[1], max_rank=8)


def test_one_place_under_two_names_is_refused(moe, tmp_path):
    directory = make_kind("experts", moe[0], tmp_path)
    tensors = load_file(directory / WEIGHTS)
    one = "base_model.model.model.layers.0.mlp.experts.1.down_proj"
    tensors |= {
        f"{one}.lora_A.weight": torch.ones(2, 48),
        f"{one}.lora_B.weight": torch.ones(64, 2),
    }
    save_file(tensors, directory / WEIGHTS)
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "target_modules": ["1.down_proj"]}))
    with pytest.raises(InvalidAdapter, match="down_proj twice"):
        load_adapter("g", directory, moe[1], max_rank=8)


@pytest.mark.parametrize("spoil", ["inner missing", "outer missing", "not named", "swapped"])
def test_stacked_experts_that_do_not_fit_their_config_are_refused(moe, tmp_path, spoil):
    directory = make_kind("experts", moe[0], tmp_path)
    tensors = load_file(directory / WEIGHTS)
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    if spoil == "not named":
        config["target_parameters"] = ["mlp.experts.down_proj"]
    elif spoil == "swapped":  # A of one with B of the other
        for name in [n for n in tensors if "base_layer" in n and "lora_A" in n]:
            other = name.replace(".base_layer", "")
            tensors[name], tensors[other] = tensors[other], tensors[name]
    else:
        is_inner = spoil == "inner missing"
        tensors = {n: t for n, t in tensors.items() if (".base_layer" in n) != is_inner}
    path.write_text(json.dumps(config))
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(InvalidAdapter, match="experts"):
        load_adapter("g", directory, moe[1], max_rank=8)


def test_loads_on_many_threads_are_as_alone(llama, tmp_path):
    directories = [make_kind("linear", llama[0], tmp_path / str(n), seed=n) for n in range(3)]
    alone = [load_adapter("g", d, llama[1], max_rank=8).info for d in directories]
    found = {}

    def load(number):
        found[number] = load_adapter("g", directories[number % 3], llama[1], max_rank=8).info

    threads = [threading.Thread(target=load, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(6)] == alone * 2
