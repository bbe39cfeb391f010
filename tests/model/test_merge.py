"""Merged linears are right whatever their owner's forward does with them."""

import torch
from support.tiny_models import make_checkpoint
from torch import nn

from plait.platform.config import Options
from plait.platform.model.build import build_skeleton
from plait.platform.model.leaves import Linear, LinearSlice, MergedLinear
from plait.platform.model.merge import replace_leaves, separate
from plait.platform.model.source import find_checkpoint


def merged(sizes=(24, 8, 8), width=16):
    weights = [torch.randn(size, width) for size in sizes]
    biases = [torch.randn(size) for size in sizes]
    names = tuple("qkv"[: len(sizes)])
    owner = MergedLinear(
        names, sizes, Linear(width, sum(sizes), has_bias=True, dtype=torch.float32)
    )
    for part in (2, 0, 1):  # in whatever order the checkpoint brings them
        owner.set_weight(part, weights[part])
        owner.set_bias(part, biases[part])
    slices = [LinearSlice(owner, part) for part in range(len(sizes))]
    return owner, slices, weights, biases


def test_one_input_object_is_multiplied_once():
    owner, slices, weights, biases = merged()
    calls = []
    owner.leaf.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(1, 5, 16)
    for leaf, weight, bias in zip(slices, weights, biases, strict=True):
        torch.testing.assert_close(leaf(x), nn.functional.linear(x, weight, bias))
    assert len(calls) == 1
    assert owner.drained


def test_other_inputs_give_their_own_results():
    _, slices, weights, biases = merged()
    x, y, z = (torch.randn(5, 16) for _ in range(3))
    for part, rows in ((0, x), (1, y), (2, z), (0, z), (0, z), (2, x), (1, x), (1, y)):
        wanted = nn.functional.linear(rows, weights[part], biases[part])
        torch.testing.assert_close(slices[part](rows), wanted)


def test_nothing_of_a_step_is_kept():
    owner, slices, *_ = merged()
    x = torch.randn(5, 16)
    slices[0](x)
    assert not owner.drained
    owner.release()
    assert owner.drained
    assert owner._slices == []


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(8, 8))

    def forward(self, x):
        other = x + 1
        return self.q_proj(x) + self.k_proj(other) + self.v_proj(other)


def test_siblings_with_different_inputs_are_separated():
    with torch.device("meta"):
        model = nn.Sequential(CrossAttention())
    leaves = replace_leaves(model)
    (owner,) = leaves.merged
    model(torch.empty(3, 8, device="meta"))
    assert owner.num_repeats
    separate(model, owner, leaves)
    assert leaves.merged == []
    assert type(model[0].k_proj) is Linear
    assert leaves.sites["0.k_proj"].leaf is model[0].k_proj


class WritesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(8, 8)
        self.up_proj = nn.Linear(8, 8)

    def forward(self, x):
        gate = self.gate_proj(x)
        x += 1
        return gate * self.up_proj(x)


@torch.no_grad()
def test_an_input_written_to_in_between_is_noticed():
    with torch.device("meta"):
        model = nn.Sequential(WritesInPlace())
    leaves = replace_leaves(model)
    model(torch.empty(3, 8, device="meta"))
    assert leaves.merged[0].num_repeats


def test_sites_keep_the_names_of_the_checkpoint(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    checkpoint = find_checkpoint(Options(model=str(directory)))
    sites = build_skeleton(checkpoint, torch.float32).leaves.sites
    attention = "model.layers.1.self_attn."
    q, k, v = (sites[attention + name] for name in ("q_proj", "k_proj", "v_proj"))
    assert q.leaf is k.leaf is v.leaf
    assert [(s.start, s.end) for s in (q, k, v)] == [(0, 64), (64, 96), (96, 128)]
    assert sites[attention + "o_proj"].leaf is not q.leaf
    assert sites["lm_head"].end == 307
