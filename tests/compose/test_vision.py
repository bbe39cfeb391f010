"""Images in engines of real code: the same tokens in any company as transformers gives alone."""

import json
import random
from dataclasses import replace

import pytest
from support.peft_adapters import fill_adapter, quiet
from support.served import SPECS, grammars_of, is_valid
from support.tiny_vision import FAMILIES
from support.vision_prompts import Prompt, make_prompt
from support.vision_served import (
    MAX_MODEL_LEN,
    ServedVision,
    generated,
    make_served_checkpoint,
    request_of,
)

from plait.platform import batch as batches
from plait.platform.core import FinishReason
from plait.platform.errors import BadRequest, ImageTooLarge, Unsupported

GENERATIONS = {"language": "a" * 64, "tower": "b" * 64, "both": "c" * 64}
TARGETS = {"language": r".*language_model.*\.(q|v)_proj", "tower": r".*visual.*(qkv|fc1)",
           "both": r".*(language_model.*v_proj|visual.*qkv)"}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`served("gemma3")` is a checkpoint's directory and transformers' model of it."""
    made = {}

    def get(family):
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = directory, make_served_checkpoint(family, directory)
        return made[family]

    return get


@pytest.fixture(scope="module")
def adapters(served, tmp_path_factory):
    """Directories of adapters of Qwen2-VL: of the language model, of the tower, of both."""
    from peft import LoraConfig, get_peft_model
    from support.tiny_vision import make_vision_model

    found = {}
    for seed, (name, pattern) in enumerate(TARGETS.items()):
        directory = tmp_path_factory.mktemp(name)
        with quiet():
            model = make_vision_model("qwen2_vl")
            adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=pattern))
            fill_adapter(adapted, seed=seed, strength=0.5)
            adapted.save_pretrained(directory)
        found[name] = directory
    return found


def continued(prompt: Prompt, tokens: list[int]) -> Prompt:
    """The same images and text, and more text."""
    return replace(prompt, tokens=[*prompt.tokens, *tokens])


def prompts_of(family, model):
    """Several sizes and places, no image, one image under two texts, and repeated n-grams."""
    sizes = FAMILIES[family].sizes
    if family == "paligemma":
        first = make_prompt(family, model, (sizes[0], 9), seed=1)
        other = make_prompt(family, model, (sizes[0], 21), seed=2)
        text = make_prompt(family, model, (30,), seed=3)
        return [first, continued(first, [7, 8, 9]), other, text]
    first = make_prompt(family, model, (11, sizes[-1], 5), seed=1)
    return [
        first,
        continued(first, [7, 8, 9] * 4),
        # Behind an image at the end, `generate` goes on from the place of its last patch, unlike
        # transformers' own forward: so each of these ends with text.
        make_prompt(family, model, (sizes[0], 3, sizes[1], 2, sizes[-1], 1), seed=2),
        make_prompt(family, model, (30,), seed=3),
        make_prompt(family, model, (2, sizes[0], 40, sizes[-1], 3), seed=4),
    ]


def asked_of(model, prompts, repeat=1, **options):
    return [
        request_of(model, prompt, f"{turn}-{i}", **options)
        for turn in range(repeat)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("rows", [16, 64, 512])
@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "gemma3"])
def test_in_any_mix_and_chunks_tokens_equal_transformers(served, family, rows):
    directory, model = served(family)
    prompts = prompts_of(family, model)
    engine = ServedVision(directory, max_num_batched_tokens=rows, max_num_seqs=8)
    got = engine.tokens(asked_of(model, prompts, repeat=2), random.Random(rows))
    for i, prompt in enumerate(prompts):
        wanted = generated(model, prompt)
        assert got[f"0-{i}", 0] == got[f"1-{i}", 0] == wanted
    stats = engine.engine.stats
    assert stats.prefix_hits > 0
    assert len(set(engine.encoded)) == len(engine.encoded) == stats.encoded_images
    assert stats.encoder_hits > 0


@pytest.mark.parametrize("family", ["qwen3_vl", "paligemma", "idefics3", "mistral3"])
def test_parked_and_evicted_images_come_again(served, family):
    """KV for one long sequence and little more, and a cache of two images or so."""
    directory, model = served(family)
    prompts = prompts_of(family, model)
    plenty = ServedVision(directory, enable_prefix_caching=False, max_num_batched_tokens=512)
    alone = {}
    for request in asked_of(model, prompts, repeat=2):
        alone |= plenty.tokens([request])
    cache = plenty.engine.config.cache
    per_block = sum(g.bytes_per_block(cache.block_size, 4) for g in cache.groups)
    bytes_per_row = plenty.strand._bytes_per_row
    most = max(item.num_embeds for prompt in prompts for item in prompt.items)
    scarce = ServedVision(
        directory,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        kv_cache_bytes=per_block * (MAX_MODEL_LEN // cache.block_size + 3),
        encoder_cache_bytes=(most + 2) * bytes_per_row,
    )
    long = [replace(r, params=replace(r.params, max_tokens=120)) for r in asked_of(model, prompts)]
    asked = [*asked_of(model, prompts, repeat=2), *long]
    for number, request in enumerate(long):
        asked[-1 - number] = replace(request, request_id=f"long-{number}")
    got = scarce.tokens(asked, random.Random(3))
    assert {who: tokens for who, tokens in got.items() if who in alone} == alone
    assert scarce.engine.stats.num_preemptions > 0
    assert scarce.engine.stats.encoder_evictions > 0 or len(set(scarce.encoded)) == 1


def test_the_test_fails_where_ranges_are_dropped(served, monkeypatch):
    directory, model = served("gemma3")
    with_images = batches._with_images
    monkeypatch.setattr(
        batches,
        "_with_images",
        lambda batch, spans: replace(with_images(batch, spans), ranges=batch.ranges),
    )
    prompts = prompts_of("gemma3", model)
    got = ServedVision(directory).tokens(asked_of(model, prompts))
    assert any(got[f"0-{i}", 0] != generated(model, p) for i, p in enumerate(prompts))


def test_a_hit_inside_a_span_goes_on_as_if_all_were_computed(served):
    """Gemma 3's image of 16 tokens begins at 11: a hit of one block ends in the middle of it."""
    directory, model = served("gemma3")
    first = make_prompt("gemma3", model, (11, (4, 4), 1), seed=8)
    second = continued(first, [9, 9, 9])
    second.tokens[27] = first.tokens[27] + 1
    engine = ServedVision(directory)
    engine.tokens([request_of(model, first, "first")])
    events = engine.run([request_of(model, second, "second")])["second", 0]
    assert events[-1].num_cached_tokens == 16
    assert [t for e in events for t in e.token_ids] == generated(model, second)


def test_adapters_a_grammar_and_answers_in_one_batch_equal_each_alone(served, adapters):
    directory, model = served("qwen2_vl")
    prompts = prompts_of("qwen2_vl", model)

    def asked(engine):
        uses = {n: engine.load_adapter(GENERATIONS[n], d) for n, d in adapters.items()}
        assert (uses["tower"].kv_digest, uses["language"].tower_digest) == ("", "")
        both = (replace(uses["tower"], scale=0.5), uses["language"])
        mixes = [(), (uses["language"],), (uses["tower"],), (uses["both"],), both]
        found = [
            request_of(model, prompt, f"{i}-{m}", fields={"adapters": mix}, n=2 if m == 2 else 1)
            for i, prompt in enumerate(prompts)
            for m, mix in enumerate(mixes)
        ]
        grammar = grammars_of(engine.started)["date"]
        found += [
            request_of(model, prompt, f"date-{i}", fields={"grammar": grammar},
                       ignore_eos=False, max_tokens=12)
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        return found

    plenty = ServedVision(directory, enable_prefix_caching=False, max_num_batched_tokens=512)
    alone, texts = {}, {}
    for request in asked(plenty):
        for who, events in plenty.run([request]).items():
            alone[who] = [t for e in events for t in e.token_ids]
            texts[who] = "".join(e.text for e in events)
    engine = ServedVision(directory, max_num_batched_tokens=32, max_num_seqs=8)
    requests = asked(engine)
    random.Random(1).shuffle(requests)
    assert engine.tokens(requests, random.Random(2)) == alone
    assert all(is_valid("date", texts[f"date-{i}", 0]) for i in range(len(prompts)))
    assert SPECS["date"].content
    with_image = [i for i, prompt in enumerate(prompts) if prompt.items]
    for i in with_image:  # the tower's adapters change answers
        assert len({tuple(alone[f"{i}-{m}", 0]) for m in range(5)}) > 2


def test_who_shares_an_image_and_who_never_does(served, adapters):
    directory, model = served("qwen2_vl")
    engine = ServedVision(directory)
    prompt = make_prompt("qwen2_vl", model, (3, (4, 2), 4), seed=1)
    other = make_prompt("qwen2_vl", model, (3, (4, 2), 4), seed=2)
    assert prompt.items[0].num_embeds == other.items[0].num_embeds
    alike = replace(other, tokens=list(prompt.tokens))  # same text, same size, another image
    uses = {n: engine.load_adapter(GENERATIONS[n], d) for n, d in adapters.items()}
    half = replace(uses["tower"], scale=0.5)
    asked = [
        (prompt, {}, 1),
        (prompt, {}, 0),
        (continued(prompt, [5, 6]), {}, 0),
        (alike, {}, 1),
        (prompt, {"adapters": (uses["language"],)}, 0),
        (prompt, {"adapters": (uses["tower"],)}, 1),
        (prompt, {"adapters": (uses["tower"], uses["language"])}, 0),
        (prompt, {"adapters": (half,)}, 1),
        (prompt, {"cache_salt": "another"}, 1),
    ]
    requests = [request_of(model, p, str(i), fields=f) for i, (p, f, _) in enumerate(asked)]
    for request, (_, _, num_encoded) in zip(requests, asked, strict=True):
        before = len(engine.encoded)
        engine.tokens([request])
        assert len(engine.encoded) - before == num_encoded, request.request_id
    together = ServedVision(directory)
    same = [replace(requests[0], request_id=f"same-{i}") for i in range(6)]
    tokens = together.tokens([*same, requests[3]])
    assert len(together.encoded) == 2
    assert tokens["same-0", 0] == generated(model, prompt)
    assert tokens["3", 0] == generated(model, alike)


def test_an_image_that_cannot_be_encoded_ends_its_request_alone(served):
    directory, model = served("llava")
    engine = ServedVision(directory)
    good = make_prompt("llava", model, (3, (2, 2), 4), seed=1)
    bad = make_prompt("llava", model, (3, (2, 2), 4), seed=2)
    broken = request_of(model, bad, "bad")
    item = replace(broken.images[0], tensors={})
    asked = [
        request_of(model, good, "good"),
        replace(broken, images=(item,)),
        request_of(model, make_prompt("llava", model, (9,), seed=3), "text"),
    ]
    found = engine.run(asked)
    last = found["bad", 0][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error[0] == "internal_error"
    assert "pixel_values" in last.error[1]
    assert [t for e in found["good", 0] for t in e.token_ids] == generated(model, good)
    assert found["text", 0][-1].finish_reason is FinishReason.LENGTH


def test_what_cannot_be_served_is_refused_with_its_reason(served, checkpoint):
    directory, model = served("gemma3")
    prompt = make_prompt("gemma3", model, (3, (4, 4), 4), seed=1)
    request = request_of(model, prompt, "a")
    small = ServedVision(directory, encoder_cache_bytes=10 * 64 * 4)
    with pytest.raises(ImageTooLarge, match=r"16 embeddings of 256 bytes, 4,096 .* 2,560"):
        small.engine.add(request)
    for wrong in (
        replace(request, spans=()),
        replace(request, images=()),
        replace(request, images=(replace(request.images[0], start=4),)),
        replace(request, positions=b"1234"),
        replace(request, spans=((3, 90),)),
    ):
        with pytest.raises(BadRequest, match="image"):
            small.engine.add(wrong)
    without = ServedVision(directory, encoder_cache_bytes=64 * 4, kv_cache_bytes=4 << 20)
    assert "1 of 256B" in json.dumps(without.started.facts["arithmetic"])
    from plait.platform.config import Options
    from plait.platform.start import start_engine

    for options in (
        Options(model=str(checkpoint("llama"))),
        Options(model=str(directory), encoder_cache_bytes=0),
    ):
        engine = start_engine(replace(options, num_threads=1, max_model_len=64)).engine
        with pytest.raises(Unsupported, match="no vision, or"):
            engine.add(request)
