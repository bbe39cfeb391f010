"""Hundreds of requests with images, sharing, cut off and constrained: nothing is left of them."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import torch
from support.served import grammars_of, is_valid
from support.vision_prompts import make_prompt
from support.vision_served import ServedVision, make_served_checkpoint, request_of

from plait.platform.core import Array, Event, FinishReason, ImageItem, Request

FAMILY = "qwen2_vl"
NUM_IMAGES, NUM_REQUESTS, ROUNDS = 50, 100, 3
CACHE_ROWS = 40  # of images of 2 to 15 rows
SIZES = ((2, 2), (1, 3), (4, 2), (3, 5))


def requests_of(model: object, engine: ServedVision, seed: int) -> list[Request]:
    """Text alone, or up to three of the images; some ask for two answers, or have a grammar."""
    rng = random.Random(seed)
    grammar = grammars_of(engine.started)["date"]
    made = []
    for number in range(NUM_REQUESTS):
        image = min(NUM_IMAGES - 1, int(rng.expovariate(1 / 15)))  # some are popular
        layout = [3, SIZES[image % 4], rng.choice((1, 4)), (1, 3), 2][: rng.choice((1, 3, 3, 5))]
        prompt = make_prompt(FAMILY, model, layout, seed=image)
        kind = number % 10
        params = {"max_tokens": rng.choice((2, 6)), "n": 2 if kind == 1 else 1}
        fields = {"grammar": grammar} if kind == 2 else {"cache_salt": "own"} if kind == 3 else {}
        if kind == 2:
            params |= {"ignore_eos": False, "max_tokens": 12}
        made.append(request_of(model, prompt, f"{kind}-{number}", fields=fields, **params))
    return made


def run(
    engine: ServedVision, asked: list[Request], rng: random.Random
) -> dict[tuple[str, int], list[Event]]:
    """All events, by answer. Requests come at random moments, and some are aborted."""
    found: dict[tuple[str, int], list[Event]] = {}
    pending, doomed = list(asked), []
    while pending or engine.engine.has_unfinished:
        for _ in range(rng.randrange(12)):
            if pending:
                request = pending.pop()
                engine.engine.add(request)
                doomed += [request.request_id] * (rng.random() < 0.2)
        if doomed and rng.random() < 0.5:
            engine.engine.abort(doomed.pop())
        for event in engine.engine.step():
            found.setdefault((event.request_id, event.index), []).append(event)
    engine.engine.scheduler.check_integrity()
    assert engine.engine.stats.kv_usage == 0
    assert not engine.strand._held
    engine.strand._cache.check_integrity(())
    return found


def left() -> tuple[int, int, int]:
    """Images and arrays alive, and bytes of tensors."""
    gc.collect()
    alive = gc.get_objects()
    tensors = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in alive
        if type(t) is torch.Tensor
    }
    kinds = [type(one) for one in alive]
    return kinds.count(ImageItem), kinds.count(Array), sum(tensors.values())


def test_of_300_requests_over_50_images_each_is_answered_and_nothing_stays(tmp_path: Path) -> None:
    model = make_served_checkpoint(FAMILY, tmp_path)
    row = 64 * 4
    engine = ServedVision(
        tmp_path,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_bytes=1 << 20,
        encoder_cache_bytes=CACHE_ROWS * row,
    )
    sizes = []
    for turn in range(ROUNDS):
        asked = requests_of(model, engine, seed=turn)
        expected = {(r.request_id, i) for r in asked for i in range(r.params.n)}
        found = run(engine, asked, random.Random(turn))
        del asked
        ends = {who: events[-1].finish_reason for who, events in found.items()}
        assert ends.keys() == expected
        assert None not in ends.values()
        assert FinishReason.ERROR not in ends.values()
        whole = [who for who, reason in ends.items() if reason is not FinishReason.ABORT]
        assert NUM_REQUESTS // 2 < len(whole) < len(ends)
        dates = [who for who in whole if who[0].startswith("2-")]
        assert dates
        for who in dates:
            assert is_valid("date", "".join(event.text for event in found[who]))
        sizes.append(left())
    stats = engine.engine.stats
    assert stats.encoder_evictions > NUM_IMAGES
    assert stats.encoder_hits > 0
    assert stats.encoder_bytes <= CACHE_ROWS * row
    images, arrays, num_bytes = sizes[-1]
    assert (images, arrays) == sizes[0][:2]
    assert num_bytes <= sizes[0][2] + CACHE_ROWS * row
