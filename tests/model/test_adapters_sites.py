"""Which places of a model adapters can change: names, shapes, and what can change K and V."""

import pytest
from support.tiny_models import make_checkpoint

from plait.adapters.sites import SiteKind
from plait.platform.config import Options
from plait.platform.model import load_model


def sites_of(family, tmp_path, **fields):
    directory = make_checkpoint(family, tmp_path, **fields)
    return load_model(Options(model=str(directory), dtype="float32")).executor.sites


def keeping_kv(sites):
    """Names of language sites that cannot change a cached K or V, without their layer."""
    return {
        site.name.partition(f".{site.layer}.")[2] or name
        for name, site in sites.sites.items()
        if not site.affects_kv
    }


def test_merged_linears_are_sites_under_their_own_names(tmp_path):
    sites = sites_of("llama", tmp_path)
    key = sites.sites["model.layers.1.self_attn.k_proj"]
    assert (key.in_features, key.out_features, key.layer) == (64, 32, 1)
    up = sites.sites["model.layers.2.mlp.up_proj"]
    assert (up.in_features, up.out_features, up.layer) == (64, 96, 2)
    assert len(sites.sites) == 3 * 7 + 2
    embedding, head = sites.sites["model.embed_tokens"], sites.sites["lm_head"]
    assert (embedding.kind, embedding.in_features, embedding.out_features) == (
        SiteKind.EMBEDDING,
        307,
        64,
    )
    assert (head.kind, head.in_features, head.out_features) == (SiteKind.HEAD, 64, 307)
    assert not sites.is_tied
    assert (sites.vocab_size, sites.model_name) == (307, tmp_path.name)


def test_only_what_follows_the_last_keys_and_values_leaves_them_alone(tmp_path):
    sites = sites_of("llama", tmp_path)
    mlp = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert keeping_kv(sites) == {"self_attn.q_proj", "self_attn.o_proj", *mlp, "lm_head"}
    assert all(site.layer in (None, 2) for site in sites.sites.values() if not site.affects_kv)


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("gpt2", {"attn.c_proj", "mlp.c_fc", "mlp.c_proj", "lm_head"}),
        (
            "gpt_neox",
            {"attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "lm_head"},
        ),
        ("phi3", {"self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "lm_head"}),
        (
            "qwen3_moe",
            {"self_attn.q_proj", "self_attn.o_proj", "lm_head"}
            | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
        ),
        (
            "deepseek_v3",
            {"self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.o_proj", "lm_head"}
            | {f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
            | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
        ),
    ],
)
def test_a_fused_projection_with_keys_in_it_changes_them(family, kept, tmp_path):
    assert keeping_kv(sites_of(family, tmp_path)) == kept


@pytest.mark.parametrize(
    ("family", "is_transposed"), [("qwen3_moe", False), ("mixtral", False), ("gpt_oss", True)]
)
def test_experts_are_sites_and_routers_and_norms_are_none(family, is_transposed, tmp_path):
    sites = sites_of(family, tmp_path).sites
    up = sites["model.layers.0.mlp.experts.gate_up_proj"]
    down = sites["model.layers.0.mlp.experts.down_proj"]
    assert up.kind is down.kind is SiteKind.EXPERTS
    assert up.in_features == down.out_features == 64
    assert up.out_features == 2 * down.in_features
    assert up.num_experts == down.num_experts > 1
    assert up.is_transposed is down.is_transposed is is_transposed
    assert not [name for name in sites if "norm" in name or "router" in name]
    assert not [name for name in sites if name.endswith("mlp.gate")]


def test_tied_tables_are_told(tmp_path):
    assert sites_of("qwen2", tmp_path).is_tied


def test_transposed_linears_are_told(tmp_path):
    sites = sites_of("gpt2", tmp_path).sites
    attention = sites["transformer.h.0.attn.c_attn"]
    assert (attention.in_features, attention.out_features) == (64, 192)
    assert attention.is_transposed
