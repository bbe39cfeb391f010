"""Every change that we read from a file against PEFT's own weights for that file."""

import json

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors.torch import load_file, save_file
from support.adapter_sites import sites_of
from support.peft_adapters import (
    EXPERT_KINDS,
    KINDS,
    LINEAR,
    load_base,
    load_peft,
    make_adapter,
    make_kind,
    quiet,
)
from support.tiny_models import VOCAB_SIZE, make_checkpoint

from plait.adapters.loading import load_adapter
from plait.adapters.sites import SiteKind


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes checkpoints, each once."""
    made = {}

    def make(family="llama", **overrides):
        key = (family, *sorted(overrides.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = make_checkpoint(family, directory, tokenizer=False, **overrides)
        return made[key]

    return make


def read(directory, base, **options):
    return load_adapter("g", directory, sites_of(base), max_rank=256, **options)


def change_of(part):
    """The product as the base stores the weight it is added to."""
    change = part.scale * part.b.float() @ part.a.float()
    is_stored_turned = part.site.kind == SiteKind.EMBEDDING or part.site.is_transposed
    return change.T if is_stored_turned else change


def peft_changes(model: PeftModel):
    """PEFT's change of each weight: parameter name → (ΔW, DoRA's magnitude, bias)."""
    found = {}
    for name, module in model.base_model.model.named_modules():
        if not isinstance(module, LoraLayer) or "default" not in module.scaling:
            continue
        if isinstance(module, ParamWrapper):
            path = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
            found[path] = (module.get_delta_weight("default"), None, None)
            continue
        magnitude = (
            module.lora_magnitude_vector["default"].weight if module.use_dora["default"] else None
        )
        bias = module.lora_B["default"].bias if "default" in module.lora_B else None
        if bias is not None:
            bias = bias * module.scaling["default"]
        found[name] = (module.get_delta_weight("default"), magnitude, bias)
    return found


def check_low_rank(directory, checkpoint):
    """Read by us and by PEFT, the same changes at the same places."""
    base = load_base(checkpoint)
    adapter = read(directory, base)
    expected = peft_changes(load_peft(checkpoint, directory))
    ours = {}
    for part in adapter.low_rank:
        ours.setdefault(part.site.name, []).append(part)
    assert ours.keys() == expected.keys()
    for name, parts in ours.items():
        change, magnitude, bias = expected[name]
        got = torch.stack([change_of(p) for p in parts]) if change.dim() == 3 else change_of(*parts)
        torch.testing.assert_close(got, change.detach(), rtol=1e-5, atol=1e-5)
        assert [p.expert for p in parts] == (
            list(range(len(parts))) if change.dim() == 3 else [None]
        )
        for tensor, wanted, factor in (
            (parts[0].magnitude, magnitude, 1.0),
            (parts[0].b_bias, bias, parts[0].scale),
        ):
            assert (tensor is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(tensor * factor, wanted.detach().flatten())
    norms = {s.name: s.change_norm for s in adapter.info.report.sites if s.rank}
    for name, (change, *_) in expected.items():
        assert norms[name] == pytest.approx(float(change.norm()), rel=1e-4)
    return adapter


LOW_RANK = [k for k in KINDS if k not in ("saved_head", "saved_embedding", "trained_tokens")]


@pytest.mark.parametrize("kind", LOW_RANK)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_changes_of_each_kind_are_those_of_peft(checkpoint, tmp_path, kind, tied):
    base = checkpoint(tie_word_embeddings=tied)
    check_low_rank(make_kind(kind, base, tmp_path), base)


@pytest.mark.parametrize("seed", range(24))
def test_the_changes_of_random_configs_are_those_of_peft(checkpoint, tmp_path, seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    def some(values):
        chosen = [v for v in values if float(torch.rand((), generator=generator)) < 0.5]
        return chosen or [pick(values)]

    ranks, alphas = [1, 2, 3, 5, 16, 33, 128], [1, 4, 7.5, 16, 64]
    # PEFT saves patterns sorted, and the first that matches counts.
    patterns = ["0.mlp.down_proj", "^model.layers.1.*up_proj", r"layers\.[01].*", "proj", "q_proj"]
    config = {
        "r": pick(ranks),
        "lora_alpha": pick(alphas),
        "use_rslora": pick([True, False]),
        "target_modules": pick([some(LINEAR), r".*\.(q|k|down)_proj"]),
        "rank_pattern": {p: pick(ranks) for p in some(patterns)},
        "alpha_pattern": {p: pick(alphas) for p in some(patterns)},
        "exclude_modules": pick([None, ["0.self_attn.q_proj"], r".*2\.mlp\..*"]),
        **pick([{}, {}, {"use_dora": True}, {"lora_bias": True}]),
    }
    if isinstance(config["target_modules"], list):
        config["layers_to_transform"] = pick([None, 1, [0, 2]])
    base = checkpoint()
    check_low_rank(make_adapter(base, tmp_path, seed=seed, **config), base)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
        ("gpt_neox", ["query_key_value", "dense", "dense_h_to_4h"]),
        ("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]),
        ("gemma3", ["q_proj", "up_proj"]),
        ("deepseek_v3", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
    ],
)
@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
def test_fused_and_transposed_layers_are_changed_as_by_peft(
    checkpoint, tmp_path, family, targets, dora
):
    base = checkpoint(family)
    made = make_adapter(base, tmp_path, r=3, lora_alpha=5, target_modules=targets, use_dora=dora)
    check_low_rank(made, base)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_experts_are_changed_as_by_peft(checkpoint, tmp_path, family, kind):
    count = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    base = checkpoint(family, **{count: 3, "intermediate_size": 40})
    check_low_rank(make_kind(kind, base, tmp_path), base)


@pytest.mark.parametrize("kind", ["experts", "experts_up"])
def test_experts_written_by_old_peft_are_changed_the_same(checkpoint, tmp_path, kind):
    checkpoint = checkpoint("qwen3_moe", num_experts=3)
    base = load_base(checkpoint)
    directory = make_kind(kind, checkpoint, tmp_path)
    new = read(directory, base)
    tensors = load_file(directory / "adapter_model.safetensors")
    rewrite_as_old_peft(tensors, num_experts=3)
    save_file(tensors, directory / "adapter_model.safetensors")
    old = read(directory, base)
    assert len(old.low_rank) == len(new.low_rank) > 0
    for one, other in zip(old.low_rank, new.low_rank, strict=True):
        assert (one.site, one.expert, one.scale) == (other.site, other.expert, other.scale)
        torch.testing.assert_close(change_of(one), change_of(other))


def rewrite_as_old_peft(tensors, num_experts):
    """Before 0.19 an (E, out, in) parameter was read as (E, in, out): A over out, B over in."""
    for name in [n for n in tensors if n.endswith("lora_A.weight")]:
        other = name.replace("lora_A", "lora_B")
        a, b = tensors[name], tensors[other]
        rank = a.shape[0] // num_experts
        a_by_expert = a.reshape(num_experts, rank, -1)
        b_by_expert = b.reshape(b.shape[0], rank, num_experts)
        tensors[name] = b_by_expert.permute(2, 1, 0).reshape(num_experts * rank, -1).contiguous()
        tensors[other] = a_by_expert.permute(2, 1, 0).reshape(a.shape[1], -1).contiguous()


@pytest.mark.parametrize(
    ("version", "agrees"), [("0.18.1", False), ("0.19.0", True), ("0.21.2", True), (None, None)]
)
def test_square_experts_are_read_by_the_version_that_wrote_them(
    checkpoint, tmp_path, version, agrees
):
    from plait.platform.errors import InvalidAdapter

    square = checkpoint("qwen3_moe", num_experts=3, hidden_size=64, moe_intermediate_size=64)
    config = EXPERT_KINDS["experts_down_and_q"]
    directory = make_adapter(square, tmp_path, **config)
    new = read(directory, load_base(square))
    change_config(directory, peft_version=version)
    if agrees is None:
        with pytest.raises(InvalidAdapter, match="peft_version"):
            read(directory, load_base(square))
        return
    part, same = (a.low_rank[0] for a in (read(directory, load_base(square)), new))
    change = change_of(same) if agrees else change_of(same).T
    assert part.site.kind == SiteKind.EXPERTS
    torch.testing.assert_close(change_of(part), change)


def change_config(directory, **changes):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_adapters_of_single_experts_are_two_halves_of_the_fused_parameter(
    checkpoint, tmp_path, family
):
    """As transformers 4 trained them, each projection of each expert on its own."""
    count = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    base = load_base(checkpoint(family, **{count: 3}))
    gate, up, down = ("gate_proj", "up_proj", "down_proj")
    prefix = "base_model.model.model.layers.0.mlp.experts"
    if family == "mixtral":
        gate, up, down = "w1", "w3", "w2"
        prefix = "base_model.model.model.layers.0.block_sparse_moe.experts"
    sites = sites_of(base).sites
    fused = sites["model.layers.0.mlp.experts.gate_up_proj"]
    inner, hidden = fused.out_features // 2, fused.in_features
    tensors = {
        f"{prefix}.1.{name}.lora_{letter}.weight": torch.randn(shape)
        for name, (o, i), r in (
            (gate, (inner, hidden), 2),
            (up, (inner, hidden), 5),
            (down, (hidden, inner), 2),
        )
        for letter, shape in (("A", (r, i)), ("B", (o, r)))
    }
    config = {"r": 2, "lora_alpha": 3, "use_rslora": True, "rank_pattern": {up: 5}}
    write_adapter(tmp_path, config | {"target_modules": [gate, up, down]}, tensors)
    parts = {p.site.name.rpartition(".")[2]: p for p in read(tmp_path, base).low_rank}

    def change(name, r):
        a, b = (tensors[f"{prefix}.1.{name}.lora_{letter}.weight"] for letter in "AB")
        return 3 / r**0.5 * b @ a

    expected = torch.cat([change(gate, 2), change(up, 5)])
    torch.testing.assert_close(change_of(parts["gate_up_proj"]), expected)
    torch.testing.assert_close(change_of(parts["down_proj"]), change(down, 2))
    assert {p.expert for p in parts.values()} == {1}


def write_adapter(directory, config, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    save_file(tensors, directory / "adapter_model.safetensors")


# --- embeddings and heads -------------------------------------------------------------------


def tables_of(adapter, base, num_new=0):
    """The embedding and the head that rows and wholes make of the base's."""
    embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings().weight
    made = {}
    for kind, weight in ((SiteKind.EMBEDDING, embedding), (SiteKind.HEAD, head)):
        table = torch.cat([weight.detach(), torch.full((num_new, weight.shape[1]), torch.nan)])
        for whole in adapter.wholes:
            if whole.site.kind == kind:
                table = whole.weight.clone()
        for rows in adapter.rows:
            if rows.site.kind == kind:
                table[rows.token_ids] = rows.rows
        made[kind] = table
    return made


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("known_base", [False, True])
@pytest.mark.parametrize(
    ("config", "num_new"),
    [
        (KINDS["saved_head"], 0),
        (KINDS["saved_embedding"], 0),
        (KINDS["trained_tokens"], 0),
        (KINDS["trained_tokens"] | {"trainable_token_indices": [308, 5, 307]}, 3),
        (KINDS["q_only"], 3),
    ],
    ids=["saved_head", "saved_embedding", "trained_tokens", "new_tokens", "wider"],
)
def test_replaced_rows_are_those_that_peft_computes_with(
    checkpoint, tmp_path, tied, known_base, config, num_new
):
    path = checkpoint(tie_word_embeddings=tied)
    directory = make_adapter(path, tmp_path, num_new_tokens=num_new, **config)
    base = load_base(path)
    weights = {
        SiteKind.EMBEDDING: base.get_input_embeddings().weight.detach(),
        SiteKind.HEAD: base.get_output_embeddings().weight.detach(),
    }
    lookup = (lambda site: weights[site.kind]) if known_base else None
    adapter = read(directory, base, base_weight=lookup)
    tables = tables_of(adapter, base, num_new)
    peft = load_peft(path, directory, num_new_tokens=num_new)
    ids = torch.arange(VOCAB_SIZE + num_new)
    with torch.no_grad(), quiet():
        embedded = peft.get_input_embeddings()(ids)
        rows = torch.eye(weights[SiteKind.HEAD].shape[1])
        logits = peft.get_output_embeddings()(rows)
    torch.testing.assert_close(tables[SiteKind.EMBEDDING], embedded)
    torch.testing.assert_close(tables[SiteKind.HEAD].T, logits)
    assert adapter.info.vocab_size == (VOCAB_SIZE + num_new if num_new else None)
    assert adapter.info.report.changes_vocabulary == bool(num_new)
    if known_base and num_new:
        assert not adapter.wholes  # new rows alone are kept


def test_base_weights_saved_beside_lora_are_dropped_where_the_base_is_known(checkpoint, tmp_path):
    path = checkpoint()
    directory = make_kind("embedding_and_head", path, tmp_path)
    base = load_base(path)
    assert len(read(directory, base).wholes) == 2
    weights = {
        SiteKind.EMBEDDING: base.get_input_embeddings().weight.detach().bfloat16(),
        SiteKind.HEAD: base.get_output_embeddings().weight.detach(),
    }
    adapter = read(directory, base, base_weight=lambda site: weights[site.kind])
    assert not adapter.wholes
    assert not adapter.rows
    assert len(adapter.low_rank) == 2
