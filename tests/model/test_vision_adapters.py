"""Adapters on tower, projector and language model: PEFT is the oracle."""

import pytest
import torch
from support.adapter_driver import place
from support.peft_adapters import fill_adapter, quiet
from support.tiny_vision import make_vision_checkpoint
from support.vision_driver import VisionDriver
from support.vision_prompts import make_prompt, oracle_logits
from support.vision_tracks import load, track_of

from plait.adapters.sites import SitePart
from plait.platform.core import AdapterUse
from plait.platform.errors import InvalidAdapter

TOWER = {
    "llava": ["q_proj", "v_proj", "fc1", "linear_2"],
    "qwen2_vl": ["qkv", "attn.proj", "fc1", "mlp.0", "q_proj"],
    "qwen3_vl": ["qkv", "linear_fc1", "v_proj"],
    "idefics3": ["k_proj", "fc2", "modality_projection.proj"],
    "mistral3": ["q_proj", "merging_layer", "linear_1"],
}
GENERATION, OTHER = "a" * 64, "b" * 64


def save_adapter(model, directory, seed=0, **config):
    """A random adapter of `model`, saved; returns PEFT's model with it."""
    from peft import LoraConfig, get_peft_model

    with quiet():
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **config))
        fill_adapter(adapted, seed=seed, strength=0.5)
        adapted.save_pretrained(directory)
    return adapted.eval()


@pytest.mark.parametrize("family", TOWER)
def test_adapted_and_base_images_in_one_batch_equal_peft(family, tmp_path):
    model = make_vision_checkpoint(family, tmp_path / "base")
    executor = load(tmp_path / "base")
    prompts = [
        make_prompt(family, model, (3, size, 4), seed=1) for size in [(2, 2), (2, 2), (3, 1)]
    ]
    if family == "llava":
        prompts = prompts[:2]
    uses = [(AdapterUse(generation=GENERATION),), (), (AdapterUse(generation=GENERATION),)]
    tracks = [
        track_of(model, prompt, num_output=5, start_step=i, adapters=use)
        for i, (prompt, use) in enumerate(zip(prompts, uses, strict=False))
    ]
    base = [oracle_logits(model, p, p.tokens).log_softmax(-1) for p in prompts]
    adapted = save_adapter(model, tmp_path / "adapter", target_modules=TOWER[family])
    adapter = place(executor, tmp_path / "adapter", GENERATION)
    parts = {change.site.part for change in adapter.low_rank}
    assert SitePart.TOWER in parts
    assert adapter.info.tower_digest
    VisionDriver(executor).run(tracks)
    for prompt, use, track, plain in zip(prompts, uses, tracks, base, strict=False):
        wanted = oracle_logits(adapted, prompt, prompt.tokens).log_softmax(-1) if use else plain
        got = torch.stack(track.logprobs)[: len(wanted)]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    with_adapter, without = tracks[0], tracks[1]
    assert not torch.allclose(
        torch.stack(list(with_adapter.embeds.values())), torch.stack(list(without.embeds.values()))
    )


def test_an_adapter_of_the_language_model_alone_leaves_images_as_they_are(tmp_path):
    model = make_vision_checkpoint("qwen2_vl", tmp_path / "base")
    executor = load(tmp_path / "base")
    prompt = make_prompt("qwen2_vl", model, (3, (2, 2), 4))
    plain = executor.encode(prompt.items)[0]
    save_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    adapter = place(executor, tmp_path / "adapter", GENERATION)
    assert not adapter.info.tower_digest
    use = AdapterUse(generation=GENERATION)
    assert torch.equal(executor.encode(prompt.items, [(use,)])[0], plain)


def test_images_before_an_adapter_becomes_active_are_the_bases(tmp_path):
    model = make_vision_checkpoint("qwen2_vl", tmp_path / "base")
    executor = load(tmp_path / "base")
    prompt = make_prompt("qwen2_vl", model, (3, (2, 2), 4, (2, 2)))
    plain = executor.encode(prompt.items)
    save_adapter(model, tmp_path / "adapter", target_modules=["qkv"])
    place(executor, tmp_path / "adapter", GENERATION)
    use = AdapterUse(generation=GENERATION, active_from=5)
    before, after = executor.encode(prompt.items, [(use,), (use,)])
    assert torch.equal(before, plain[0])
    assert not torch.allclose(after, plain[1])


def test_an_adapter_on_the_patch_embedding_is_refused_by_name(tmp_path):
    model = make_vision_checkpoint("qwen2_vl", tmp_path / "base")
    executor = load(tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", target_modules=["patch_embed.proj", "qkv"])
    with pytest.raises(InvalidAdapter, match=r"visual\.patch_embed\.proj"):
        place(executor, tmp_path / "adapter", GENERATION)
