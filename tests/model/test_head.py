"""From hidden rows to logits: by the family's forward, or by its linear layer where that is all."""

import pytest
import torch
from support.tiny_models import make_checkpoint

from plait.platform.config import Options
from plait.platform.model.build import build_skeleton
from plait.platform.model.head import FamilyHead
from plait.platform.model.leaves import Linear
from plait.platform.model.source import find_checkpoint


@pytest.mark.parametrize(
    ("family", "is_leaf"),
    [
        ("llama", True),
        ("qwen2", True),
        ("gpt_neox", True),
        ("gemma2", False),  # caps its logits
        ("granite", False),  # divides them
        ("cohere2", False),  # multiplies them
    ],
)
def test_only_a_head_without_anything_around_is_its_leaf(family, is_leaf, tmp_path):
    options = Options(model=str(make_checkpoint(family, tmp_path)))
    skeleton = build_skeleton(find_checkpoint(options), torch.float32, options)
    assert type(skeleton.head) is (Linear if is_leaf else FamilyHead)
    assert not skeleton.model.get_output_embeddings()._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leaf_gives_what_the_family_gives_bit_for_bit(dtype, tmp_path):
    options = Options(model=str(make_checkpoint("llama", tmp_path)))
    skeleton = build_skeleton(find_checkpoint(options), dtype, options)
    leaf = skeleton.model.get_output_embeddings()
    leaf.set_weight(torch.randn(leaf.out_features, leaf.in_features).to(dtype))
    rows = torch.randn(5, leaf.in_features).to(dtype)
    with torch.inference_mode():
        got = skeleton.head(rows)
        assert got.dtype is torch.float32
        assert torch.equal(got, FamilyHead(skeleton.model)(rows))
