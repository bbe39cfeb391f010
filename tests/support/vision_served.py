"""Real engines on tiny vision-language models, and requests with images for them."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from support.tiny_models import make_tokenizer
from support.tiny_vision import FAMILIES, IMAGE_TOKEN, make_vision_checkpoint
from support.vision_prompts import Prompt, grid_positions

from plait.platform.config import Options
from plait.platform.core import AdapterUse, Event, FinishReason, Request, SamplingParams
from plait.platform.messages import LoadAdapter
from plait.platform.start import start_engine
from plait.vision.strand import VisionStrand

MAX_MODEL_LEN = 256


def make_served_checkpoint(family: str, directory: Path, **options: Any) -> Any:
    """A tiny checkpoint with a tokenizer; returns transformers' model of it, the oracle."""
    model = make_vision_checkpoint(family, directory, **options)
    make_tokenizer().save_pretrained(directory)
    return model


class ServedVision:
    """An engine on such a checkpoint."""

    def __init__(self, directory: Path, **options: Any) -> None:
        given = {"kv_cache_bytes": 32 << 20, "adapter_memory_bytes": 4 << 20, **options}
        self.started = start_engine(
            Options(
                model=str(directory),
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                max_num_queued_reqs=1000,
                num_threads=1,
                progress=False,
                **given,
            )
        )
        self.engine = self.started.engine
        self.encoded: list[str] = []  # keys, in the order in which the tower made them
        executor = self.engine._executor
        encode = executor.encode

        def counted(items: Any, adapters: Any = ()) -> Any:
            self.encoded += [item.key for item in items]
            return encode(items, adapters)

        executor.encode = counted  # type: ignore[method-assign]

    @property
    def strand(self) -> VisionStrand:
        (strand,) = (s for s in self.engine._strands._strands if isinstance(s, VisionStrand))
        return strand

    def load_adapter(self, generation: str, directory: Path) -> AdapterUse:
        self.engine.load_adapter(LoadAdapter(generation=generation, directory=str(directory)))
        while not (results := self.engine.take_adapter_results()):
            self.engine.step()
        info = results[0].info
        assert info is not None, results[0].error
        return AdapterUse(
            generation=generation, kv_digest=info.kv_digest, tower_digest=info.tower_digest
        )

    def run(
        self, asked: list[Request], rng: random.Random | None = None
    ) -> dict[tuple[str, int], list[Event]]:
        """All events, by answer. With `rng`, requests come in at random moments."""
        found: dict[tuple[str, int], list[Event]] = {}
        pending = list(asked)
        while pending or self.engine.has_unfinished:
            for _ in range(len(pending) if rng is None else rng.randrange(3)):
                if pending:
                    self.engine.add(pending.pop(0))
            for event in self.engine.step():
                found.setdefault((event.request_id, event.index), []).append(event)
            self.engine.scheduler.check_integrity()
        assert self.engine.stats.kv_usage == 0
        assert not self.strand._held
        self.strand._cache.check_integrity(())
        return found

    def tokens(
        self, asked: list[Request], rng: random.Random | None = None
    ) -> dict[tuple[str, int], list[int]]:
        """The tokens of each answer, none of which failed."""
        found = self.run(asked, rng)
        for events in found.values():
            assert events[-1].finish_reason is not FinishReason.ERROR, events[-1].error
        return {who: [t for e in events for t in e.token_ids] for who, events in found.items()}


def request_of(
    model: Any, prompt: Prompt, request_id: str, *, fields: dict[str, Any] | None = None,
    **params: Any,
) -> Request:  # fmt: skip
    """A greedy request of a prompt."""
    positions, delta = grid_positions(model, prompt)
    plain: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    if prompt.items and prompt.spans and prompt.family == "paligemma":
        text = f"{prompt.tokens}{[(i.key, i.start) for i in prompt.items]}"
        fields = {"vision_digest": sha256(text.encode()).hexdigest(), **(fields or {})}
    has_grid = positions is not None and prompt.items
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt.tokens),
        params=SamplingParams(**{**plain, **params}),
        images=tuple(prompt.items),
        positions=positions.to(torch.int32).numpy().tobytes() if has_grid else b"",
        position_delta=delta if has_grid else 0,
        spans=prompt.spans if prompt.items else (),
        **(fields or {}),
    )


@torch.no_grad()
def generated(model: Any, prompt: Prompt, num_tokens: int = 8) -> list[int]:
    """Greedy tokens by transformers' own `generate`."""
    ids = torch.tensor([prompt.tokens])
    arguments = dict(prompt.arguments)
    kind = FAMILIES[prompt.family].uses_token_types
    if kind:
        arguments[kind] = prompt.types(len(prompt.tokens))
    if prompt.family == "llava_onevision":
        arguments["batch_num_images"] = torch.tensor([len(prompt.pictures)])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,  # which bans the end
        eos_token_id=IMAGE_TOKEN,  # which is not answered anyway
        pad_token_id=0,
        **arguments,
    )
    tokens: list[int] = out[0, len(prompt.tokens) :].tolist()
    return tokens
