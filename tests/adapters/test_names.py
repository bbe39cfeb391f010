"""Which names are which sites, and which adapters are refused for theirs."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.adapter_sites import sites_of
from support.peft_adapters import KINDS, load_base, make_kind
from support.tiny_models import make_checkpoint

from plait.adapters.adapter import Adapter
from plait.adapters.loading import load_adapter
from plait.adapters.sites import ModelSites, Site, SiteKind, SitePart
from plait.platform.errors import InvalidAdapter


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    checkpoint = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), tokenizer=False)
    return checkpoint, sites_of(load_base(checkpoint))


@pytest.fixture(scope="module")
def linear(llama, tmp_path_factory):
    """Config and tensors of an adapter of all linears."""
    directory = make_kind("linear", llama[0], tmp_path_factory.mktemp("linear"))
    config = json.loads((directory / "adapter_config.json").read_text())
    return config, load_file(directory / "adapter_model.safetensors")


def write(directory, config, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def load(directory, sites) -> Adapter:
    return load_adapter("g", directory, sites, max_rank=128)


def wrapped(sites: ModelSites, prefix: str) -> ModelSites:
    """The same model inside a wrapper with a tower whose layers have the same numbers."""
    found = {}
    for site in sites.sites.values():
        name = site.name.replace("model.", prefix, 1) if site.name != "lm_head" else site.name
        found[name] = Site(
            name=name,
            kind=site.kind,
            in_features=site.in_features,
            out_features=site.out_features,
        )
    for name in ("q_proj", "fc1"):
        full = f"model.vision_tower.layers.0.self_attn.{name}"
        found[full] = Site(
            name=full, kind=SiteKind.LINEAR, in_features=64, out_features=64, part=SitePart.TOWER
        )
    return ModelSites(
        sites=found, is_tied=sites.is_tied, vocab_size=sites.vocab_size, model_name="wrapper"
    )


def same_changes(one: Adapter, other: Adapter) -> bool:
    return len(one.low_rank) == len(other.low_rank) and all(
        torch.equal(a.a, b.a) and torch.equal(a.b, b.b)
        for a, b in zip(one.low_rank, other.low_rank, strict=True)
    )


@pytest.mark.parametrize(
    ("written", "served"),
    [
        ("base_model.model.model.", "model."),
        ("model.", "model."),  # without PEFT's prefix
        ("base_model.model.model.", "model.language_model."),
        ("base_model.model.language_model.model.", "model.language_model."),
        ("base_model.model.model.language_model.", "model.language_model."),
        ("base_model.model.model.language_model.", "model."),
        ("base_model.model.language_model.model.", "model."),
        ("base_model.model.", "model."),  # of the backbone alone
        ("base_model.model.", "model.language_model."),
    ],
)
def test_a_text_model_is_found_with_and_without_its_wrapper(
    llama, linear, tmp_path, written, served
):
    config, tensors = linear
    moved = {k.replace("base_model.model.model.", written): v for k, v in tensors.items()}
    sites = llama[1] if served == "model." else wrapped(llama[1], served)
    adapter = load(write(tmp_path / "a", config, moved), sites)
    assert all(part.site.name.startswith(f"{served}layers.") for part in adapter.low_rank)
    assert all(part.site.part == SitePart.LANGUAGE for part in adapter.low_rank)
    plain = load(write(tmp_path / "b", config, tensors), llama[1])
    assert same_changes(adapter, plain)


def test_the_older_name_of_a_head_is_understood(llama, tmp_path):
    config = {"r": 2, "target_modules": ["embed_out"]}
    tensors = {"embed_out.lora_A.weight": torch.ones(2, 64)}
    tensors["embed_out.lora_B.weight"] = torch.ones(307, 2)
    (part,) = load(write(tmp_path, config, tensors), llama[1]).low_rank
    assert part.site.name == "lm_head"


def test_a_module_saved_several_times_counts_once_and_has_to_be_one(llama, tmp_path):
    config = {"r": 2, "modules_to_save": ["lm_head"]}
    head = "base_model.model.lm_head"
    tensors = {
        f"{head}.weight": torch.full((307, 64), 2.0),
        f"{head}.modules_to_save.weight": torch.full((307, 64), 2.0),
        f"{head}.original_module.weight": torch.ones(307, 64),
    }
    (whole,) = load(write(tmp_path / "a", config, tensors), llama[1]).wholes
    assert (whole.weight == 2).all()
    tensors[f"{head}.weight"] = torch.ones(307, 64)
    with pytest.raises(InvalidAdapter, match="differ"):
        load(write(tmp_path / "b", config, tensors), llama[1])
    alone = {f"{head}.original_module.weight": torch.ones(307, 64)}
    with pytest.raises(InvalidAdapter, match="fit no place"):
        load(write(tmp_path / "c", {"r": 2}, alone), llama[1])


def test_tower_names_go_to_the_tower(llama, tmp_path):
    sites = wrapped(llama[1], "model.language_model.")
    for prefix in ("vision_tower.", "model.vision_tower."):
        name = f"base_model.model.{prefix}layers.0.self_attn.q_proj"
        tensors = {
            f"{name}.lora_A.weight": torch.ones(8, 64),
            f"{name}.lora_B.weight": torch.ones(64, 8),
        }
        adapter = load(write(tmp_path, {"peft_type": "LORA"}, tensors), sites)
        assert [p.site.part for p in adapter.low_rank] == [SitePart.TOWER]
        assert adapter.info.tower_digest
        assert adapter.info.report.changes_tower


def test_a_name_that_fits_two_places_is_refused(llama, linear, tmp_path):
    config, tensors = linear
    both = {**llama[1].sites, **wrapped(llama[1], "model.language_model.").sites}
    sites = ModelSites(sites=both, is_tied=False, vocab_size=307, model_name="both")
    with pytest.raises(InvalidAdapter, match="more than one way"):
        load(write(tmp_path, config, tensors), sites)


def test_two_spellings_of_one_place_are_refused(llama, linear, tmp_path):
    config, tensors = linear
    written = ("model.language_model.", "language_model.model.")
    moved = {
        name.replace("base_model.model.model.", f"base_model.model.{prefix}"): tensor.clone()
        for prefix in written
        for name, tensor in tensors.items()
        if "layers.0" in name
    }
    with pytest.raises(InvalidAdapter, match="twice, by different names"):
        load(write(tmp_path, config, moved), wrapped(llama[1], "model.language_model."))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_renamed_tensor_is_listed_and_the_adapter_refused(
    llama, linear, tmp_path_factory, data
):
    config, tensors = linear
    names = sorted(tensors)
    renamed = data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=5))
    spoil = data.draw(
        st.sampled_from(
            [
                lambda n: n.replace("layers.", "blocks."),
                lambda n: n.replace(".weight", ".default.weight"),
                lambda n: n.replace("proj", "projection"),
                lambda n: f"x.{n}",
                lambda n: n.replace("lora_", "loha_"),
                lambda n: n.replace("base_model.model.", "base_model.model.base_model.model."),
            ]
        )
    )
    new = {spoil(k) if k in renamed else k: v for k, v in tensors.items()}
    with pytest.raises(InvalidAdapter) as caught:
        load(write(tmp_path_factory.mktemp("renamed"), config, new), llama[1])
    assert set(caught.value.report.unmatched) == {spoil(name) for name in renamed}
    assert caught.value.report.num_tensors == len(tensors)


def test_the_order_of_tensors_decides_nothing(llama, linear, tmp_path):
    config, tensors = linear
    plain = load(write(tmp_path / "a", config, tensors), llama[1])
    # The file lays tensors out by size, then name: the prefix moves half of them to the end.
    names = list(tensors)
    turned = {n.removeprefix("base_model.model."): tensors[n] for n in names[::-2]}
    mixed = {
        **turned,
        **{n: tensors[n] for n in names if n.removeprefix("base_model.model.") not in turned},
    }
    other = load(write(tmp_path / "b", config, mixed), llama[1])
    assert plain.info.kv_digest == other.info.kv_digest
    by_name = {p.site.name: p for p in other.low_rank}
    assert all(torch.equal(by_name[p.site.name].b, p.b) for p in plain.low_rank)
    assert all(by_name[p.site.name].scale == p.scale for p in plain.low_rank)


A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = A0.replace("lora_A", "lora_B")
MAGNITUDE = A0.replace("lora_A.weight", "lora_magnitude_vector")
UP = "base_model.model.model.layers.0.mlp.up_proj.weight"
NORM = "base_model.model.model.norm.weight"
TOKENS = "embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c, t: t.pop(B0), "stands without its lora_B"),
        (lambda c, t: t.pop(A0), "stands without its lora_A"),
        (lambda c, t: t.update({A0: torch.ones(4, 64), B0: torch.ones(64, 4)}), "says rank 8"),
        (lambda c, t: t.update({A0: torch.ones(8, 63)}), "shape"),
        (lambda c, t: t.update({B0: torch.ones(64, 7)}), "shape"),
        (lambda c, t: t.update({A0: torch.ones(8 * 64)}), "says rank 8"),
        (lambda c, t: t.update({A0: torch.full((8, 64), torch.nan)}), "NaN"),
        (lambda c, t: t.update({B0: torch.full((64, 8), torch.inf)}), "NaN or infinity"),
        (lambda c, t: c.update(r=16), "says rank 16"),
        (lambda c, t: c.update(target_modules=["k_proj"]), "leave out"),
        (lambda c, t: c.update(exclude_modules=["q_proj"]), "leave out"),
        (lambda c, t: c.update(layers_to_transform=[1]), "leave out"),
        (lambda c, t: c.update(use_dora=True), "lora_magnitude_vector is missing"),
        (lambda c, t: c.update(lora_bias=True), "lora_B.bias is missing"),
        (
            lambda c, t: t.update({MAGNITUDE: torch.ones(64)}),
            "no use_dora",
        ),
        (lambda c, t: t.update({B0.replace("weight", "bias"): torch.ones(64)}), "no lora_bias"),
        (lambda c, t: c.update(modules_to_save=["lm_head"]), "which the file lacks"),
        (lambda c, t: c.update(trainable_token_indices=[1]), "no such rows"),
        (lambda c, t: c.update(alora_invocation_tokens=[307]), "beyond the vocabulary"),
        (
            lambda c, t: t.update({UP: torch.ones(96, 64)}),
            "fit no place",
        ),
        (lambda c, t: t.update({NORM: torch.ones(64)}), "fit no place"),
        (lambda c, t: t.clear(), "no tensors"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_said(llama, linear, tmp_path, edit, message):
    config, tensors = dict(linear[0]), dict(linear[1])
    edit(config, tensors)
    with pytest.raises(InvalidAdapter, match=message) as caught:
        load(write(tmp_path, config, tensors), llama[1])
    assert caught.value.report is not None


def test_an_adapter_that_changes_nothing_is_loaded_only_if_that_is_meant(llama, linear, tmp_path):
    config, tensors = linear
    fresh = {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in tensors.items()}
    directory = write(tmp_path, config, fresh)
    with pytest.raises(InvalidAdapter, match="allow_zero_delta") as caught:
        load(directory, llama[1])
    assert {site.change_norm for site in caught.value.report.sites} == {0.0}
    adapter = load_adapter("g", directory, llama[1], max_rank=128, allow_zero_delta=True)
    assert adapter.info.kv_digest == ""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("config", "tables", "message"),
    [
        ({}, {"embed_tokens.weight": 310}, "different numbers"),
        ({}, {"lm_head.weight": 310}, "different numbers"),
        ({}, {"embed_tokens.weight": 306, "lm_head.weight": 306}, "or more"),
        ({"trainable_token_indices": [308]}, {TOKENS: 1}, "do not follow"),
        ({"trainable_token_indices": [1, 2]}, {TOKENS: 1}, "shape"),
        ({"trainable_token_indices": {"wte": [1], "x": [2]}}, {TOKENS: 1}, "which tokens"),
    ],
)
def test_vocabularies_that_do_not_fit_are_refused(llama, tmp_path, tied, config, tables, message):
    sites = ModelSites(
        sites=llama[1].sites, is_tied=tied, vocab_size=llama[1].vocab_size, model_name="base"
    )
    tensors = {
        (name if name.startswith("lm_head") else f"model.{name}"): torch.ones(rows, 64)
        for name, rows in tables.items()
    }
    with pytest.raises(InvalidAdapter, match=message):
        load(write(tmp_path, config, tensors), sites)


def test_only_what_can_change_keys_and_values_is_in_their_digest(llama, tmp_path):
    checkpoint, sites = llama
    last = {
        name: Site(
            name=site.name,
            kind=site.kind,
            in_features=site.in_features,
            out_features=site.out_features,
            affects_kv="layers.2" not in name or name.endswith(("k_proj", "v_proj")),
        )
        for name, site in sites.sites.items()
    }
    sites = ModelSites(sites=last, is_tied=False, vocab_size=307, model_name="base")
    digests = {
        kind: load(make_kind(kind, checkpoint, tmp_path / kind), sites).info.kv_digest
        for kind in ("last_layer_no_kv", "saved_head", "head", "q_only", "embedding")
    }
    assert digests["last_layer_no_kv"] == digests["head"] == ""
    # The head does not count: its adapter has the same digest as the rest of it alone.
    assert digests["saved_head"] == digests["q_only"] != digests["embedding"] != ""
    other = load(make_kind("q_only", checkpoint, tmp_path / "s", seed=1), sites).info.kv_digest
    assert other != digests["q_only"]
    assert KINDS["saved_head"]["r"] == KINDS["q_only"]["r"]
