"""Configs and bundles, key by key."""

import json
import time

import pytest
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from plait.adapters.bundle import Bundle, parse_bundle
from plait.adapters.peft_config import check_config, parse_config
from plait.adapters.targets import is_target_module, warnings_of_targets
from plait.platform.errors import InvalidAdapter


def test_what_a_config_leaves_out_is_as_in_peft():
    config, peft = check_config({}), LoraConfig()
    for name in ("r", "lora_alpha", "use_rslora", "use_dora", "lora_bias"):
        assert getattr(config, name) == getattr(peft, name)
    assert config.scale("model.layers.0.self_attn.q_proj") == 1.0
    # Not "alpha = r": a rank of 64 without an alpha has an eighth of the scale.
    assert check_config({"r": 64}).scale("q_proj") == 1 / 8
    assert check_config({"r": 64, "lora_alpha": None}).scale("q_proj") == 1 / 8


def test_all_that_peft_writes_by_default_is_accepted():
    written = {**LoraConfig(r=4, target_modules=["q_proj"]).to_dict(), "peft_version": "0.21.2"}
    written["target_modules"] = list(written["target_modules"])
    written["peft_type"] = "LORA"
    config = parse_config(json.dumps(written, default=str).encode())
    assert config.r == 4
    assert config.target_modules == {"q_proj"}


REFUSED = [
    {"peft_type": "IA3"},
    {"peft_type": "ADALORA"},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"layer_replication": [[0, 4]]},
    {"use_qalora": True},
    {"use_bdlora": {"nblocks": 2}},
    {"arrow_config": {"top_k": 3}},
    {"monteclora_config": {"x": 1}},
    {"kasa_config": {"beta": 1}},
    {"megatron_config": {"x": 1}},
    {"ensure_weight_tying": True},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_16"},
    {"init_lora_weights": "OLoRA"},
    {"init_lora_weights": "corda"},
    {"init_lora_weights": "loftq"},
    {"init_lora_weights": "lora_ga"},
    {"init_lora_weights": "magic"},
    {"init_lora_weights": 3},
    {"some_new_thing": 1},
    {"some_new_thing": "x"},
    {"some_new_thing": 0},
    {"r": 0},
    {"r": -8},
    {"r": 8.0},
    {"r": "8"},
    {"r": True},
    {"lora_alpha": "16"},
    {"lora_alpha": 1e300},
    {"use_dora": 1},
    {"use_rslora": "true"},
    {"rank_pattern": {"q_proj": 0}},
    {"rank_pattern": {"q_proj": 2.5}},
    {"rank_pattern": {"(": 2}},
    {"rank_pattern": [["q_proj", 2]]},
    {"alpha_pattern": {"q_proj": None}},
    {"target_modules": "("},
    {"target_modules": [1]},
    {"target_modules": {"a": 1}},
    {"target_parameters": "experts.down_proj"},
    {"layers_to_transform": [-1]},
    {"layers_to_transform": ["0"]},
    {"trainable_token_indices": [5, 5]},
    {"trainable_token_indices": [-1]},
    {"trainable_token_indices": {"embed_tokens": ["a"]}},
    {"alora_invocation_tokens": ["a"]},
    {"alora_invocation_tokens": [1] * 5000},
    {"base_model_name_or_path": 3},
    {"use_dora": True, "lora_bias": True},
    {"use_dora": True, "target_parameters": ["experts.down_proj"]},
    {"lora_bias": True, "target_parameters": ["experts.down_proj"]},
    {"alora_invocation_tokens": [1], "use_dora": True},
    {"alora_invocation_tokens": [1], "trainable_token_indices": [2]},
]


@pytest.mark.parametrize("config", REFUSED, ids=[json.dumps(c)[:60] for c in REFUSED])
def test_what_would_be_computed_otherwise_is_refused_by_its_key(config):
    with pytest.raises(InvalidAdapter) as caught:
        check_config(config)
    assert any(key in caught.value.message for key in config)


ACCEPTED = [
    {"init_lora_weights": value}
    for value in (True, False, None, "gaussian", "eva", "orthogonal", "mica")
] + [
    {"lora_dropout": 0.1, "inference_mode": True, "task_type": "CAUSAL_LM", "revision": "main"},
    {"auto_mapping": {"x": 1}, "eva_config": {"rho": 2.0}, "qalora_group_size": 16},
    {"velora_config": {"x": 1}, "megatron_core": "megatron.core", "loftq_config": {}},
    {"some_new_thing": None, "another": False, "one_more": [], "and_this": {}},
    {"fan_in_fan_out": True},
]


@pytest.mark.parametrize("config", ACCEPTED, ids=[json.dumps(c)[:60] for c in ACCEPTED])
def test_what_decides_nothing_is_accepted(config):
    assert check_config(config) == check_config({})


@pytest.mark.parametrize(
    ("pattern", "hits", "misses"),
    [
        ("0.attn.q_proj", "model.layers.0.attn.q_proj", "model.layers.10.attn.q_proj"),
        ("q_proj", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qq_proj"),
        ("layers.1.*", "model.layers.11.mlp.up_proj", "model.layers.2.mlp.up_proj"),
        ("^model.*down_proj", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"),
        ("q_proj|v_proj", "model.layers.0.v_proj", "model.layers.0.k_proj"),
        (r"[01]\.q_pro[j]", "layers.1.q_proj", "layers.2.q_proj"),
        (r"(?i:Q_PROJ)", "layers.1.q_proj", "layers.2.k_proj"),
        ("self.attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.xself.attn.q_proj"),
        ("q_proj.", "layers.1.q_projx", "layers.1.q_proj"),
        (r"layers\.\d{1,2}\.q", "model.layers.11.q", "model.layers.111.q"),
        (r"q_\w+", "layers.1.q_proj", "layers.2.k_proj"),
        (r"layers\.\d", "model.layers.1", "model.layers.x"),
        (r"^(?!.*visual).*q_proj", "model.layers.0.q_proj", "model.visual.0.q_proj"),
    ],
)
def test_patterns_match_as_in_peft(pattern, hits, misses):
    config = check_config({"r": 4, "rank_pattern": {pattern: 2}})
    for name, rank in ((hits, 2), (misses, 4)):
        assert config.rank(name) == rank
        assert (get_pattern_key([pattern], name) == pattern) == (rank == 2)


def test_the_first_pattern_that_matches_counts():
    config = check_config({"rank_pattern": {"up_proj": 2, "0.up_proj": 3, ".*": 5}})
    assert [config.rank(f"layers.{n}") for n in ("0.up_proj", "0.q_proj")] == [2, 5]


def test_a_pattern_for_every_module_is_quick():
    """As EVA writes them."""
    names = [f"model.layers.{n}.mlp.{p}_proj" for n in range(60) for p in "abcdefg"]
    ranks = {name: n + 1 for n, name in enumerate(names)}
    config = check_config({"rank_pattern": ranks, "alpha_pattern": ranks, "use_rslora": True})
    start = time.monotonic()
    assert [config.rank(name) for name in names] == list(ranks.values())
    assert config.scale(names[-1]) == len(names) ** 0.5
    assert time.monotonic() - start < 5


def test_a_pattern_cannot_take_long():
    config = check_config({"rank_pattern": {r"(a|aa)+[bc]": 2}})
    start = time.monotonic()
    with pytest.raises(InvalidAdapter, match="too long to match"):
        config.rank("a" * 60)
    assert time.monotonic() - start < 5


def test_a_pattern_that_is_quick_on_each_name_cannot_take_long_on_all():
    config = check_config({"rank_pattern": {r"(a|aa)+[bc]": 2}})
    start = time.monotonic()
    with pytest.raises(InvalidAdapter, match="too long to match"):
        [config.rank(name) for name in ["a" * 26] * 100_000]  # some milliseconds each
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "pattern",
    [
        "(?x)q_proj #",  # a comment that goes on behind it
        "(?:k_proj){e}",  # what follows are `regex`'s own words, not `re`'s
        "q_proj{s<=1}",
        r"\p{Lu}_proj",
        "(?R)",
        "(?e)q_proj",
    ],
)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "target_modules"])
def test_what_is_no_pattern_of_peft_is_refused(key, pattern):
    value = pattern if key == "target_modules" else {pattern: 2}
    with pytest.raises(InvalidAdapter, match=f"{key}: .* is no pattern"):
        check_config({key: value})


def test_long_lists_take_no_time():
    listed = [f"layers.{n}.q_proj" for n in range(60_000)]
    modules = [f"model.{name}" for name in listed[:1000]]
    start = time.monotonic()
    config = check_config({"target_modules": listed, "exclude_modules": listed[1000:]})
    assert all(is_target_module(config, module) for module in modules)
    assert len(warnings_of_targets(config, modules)) < 20
    assert time.monotonic() - start < 2
    for value in ({f"x{n}.*": 2 for n in range(1000)}, {f"(x){n}": 2 for n in range(1000)}):
        with pytest.raises(InvalidAdapter, match="at most 256 patterns"):
            check_config({"rank_pattern": value})


def test_a_name_in_full_is_targeted_whatever_layers_are_chosen():
    config = check_config(
        {"target_modules": ["layers.1.q_proj", "v_proj"], "layers_to_transform": [0]}
    )
    assert not is_target_module(config, "model.layers.1.q_proj")
    assert is_target_module(config, "layers.1.q_proj")
    assert is_target_module(config, "model.layers.0.v_proj")
    assert not is_target_module(config, "model.layers.1.v_proj")


# --- bundles --------------------------------------------------------------------------------


def test_a_bundle_is_read_whole():
    bundle = parse_bundle(
        json.dumps(
            {
                "chat_template": "{{ messages }}",
                "stop": ["###", "\n\n"],
                "sampling": {"temperature": 0.2, "top_k": 40},
                "response_format": {"type": "json_object"},
                "draft_adapter": "small",
            }
        ).encode()
    )
    assert bundle == Bundle(
        chat_template="{{ messages }}",
        stop=("###", "\n\n"),
        sampling={"temperature": 0.2, "top_k": 40},
        response_format={"type": "json_object"},
        draft_adapter="small",
    )
    assert parse_bundle(b"{}") == Bundle()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_templates", "x"),
        ("chat_template", ""),
        ("chat_template", 3),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", ["x"] * 17),
        ("sampling", {"temprature": 1}),
        ("sampling", {"temperature": "hot"}),
        ("sampling", {"temperature": 5}),
        ("sampling", {"top_k": 1.5}),
        ("sampling", {"top_p": True}),
        ("sampling", []),
        ("response_format", {"schema": {}}),
        ("draft_adapter", ""),
    ],
)
def test_a_field_of_a_bundle_that_would_do_nothing_is_refused(field, value):
    with pytest.raises(InvalidAdapter, match=field):
        parse_bundle(json.dumps({field: value}).encode())
