"""Images and prompts for tiny vision-language models, made by hand, and what transformers answers.

No processor: an image is random pixels in the shape that the family's `get_image_features` takes,
and its range in the prompt is what the family's processor would write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from support.tiny_vision import BREAK_TOKEN, FAMILIES, IMAGE_TOKEN, PINPOINTS

from plait.platform.core import Array, ImageItem


@dataclass(kw_only=True)
class Picture:
    """One image: its tensors, and the tokens of its range."""

    tensors: dict[str, torch.Tensor]
    tokens: list[int]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Runs of embedding rows in the range."""
        runs: list[list[int]] = []
        for at, token in enumerate(self.tokens):
            if token != IMAGE_TOKEN:
                continue
            if runs and sum(runs[-1]) == at:
                runs[-1][1] += 1
            else:
                runs.append([at, 1])
        return tuple((at, length) for at, length in runs)

    def item(self, start: int) -> ImageItem:
        """As the engine has it."""
        arrays = {
            name: Array(
                dtype=str(t.numpy().dtype),
                shape=tuple(t.shape),
                data=t.contiguous().numpy().tobytes(),
            )
            for name, t in self.tensors.items()
        }
        digest = sha256(b"".join(a.data for a in arrays.values())).hexdigest()
        return ImageItem(
            key=digest, start=start, num_tokens=len(self.tokens), embedded=self.runs, tensors=arrays
        )


def make_picture(
    family: str, model: Any, size: tuple[int, int], *, seed: int = 0, is_alone: bool = True
) -> Picture:
    """A random image of `size`, in the family's units; LLaVA-OneVision only tiles a lone one."""
    tiny = FAMILIES[family]
    generator = torch.Generator().manual_seed(seed)
    height, width = (n * tiny.unit for n in size)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    kind = model.config.model_type
    sizes = torch.tensor([[height, width]])
    if kind in (
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "glm4v",
        "glm46v",
        "glm4v_moe",
    ):
        rows, columns = height // 4, width // 4
        tensors = {
            "pixel_values": pixels(rows * columns, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }
        tokens = [IMAGE_TOKEN] * (rows * columns // 4)
    elif family in ("llava_pixtral", "mistral3"):
        tensors = {"pixel_values": pixels(1, 3, height, width), "image_sizes": sizes}
        row = [IMAGE_TOKEN] * (width // tiny.unit) + [BREAK_TOKEN]
        tokens = row * (height // tiny.unit)
    elif family in ("idefics3", "smolvlm"):
        tiles = size[0] * size[1]
        tensors = {
            "pixel_values": pixels(tiles, 3, 16, 16),
            "pixel_attention_mask": torch.ones(tiles, 16, 16, dtype=torch.bool),
        }
        tokens = [BREAK_TOKEN, *[IMAGE_TOKEN] * 4] * tiles
    elif family in ("internvl", "aya_vision", "cohere2_vision"):
        tensors = {"pixel_values": pixels(size[0] * size[1], 3, 16, 16)}
        tokens = [IMAGE_TOKEN] * 4 * size[0] * size[1]
    elif family in ("llava_next", "llava_onevision"):
        whole = family == "llava_onevision" and not is_alone
        tensors, tokens = _tiled(model, pixels, sizes, {"batch_num_images": [2]} if whole else {})
    else:
        side = tiny.vision["image_size"]
        tensors = {"pixel_values": pixels(1, 3, side, side)}
        tokens = [IMAGE_TOKEN] * (16 if family == "gemma3" else (side // 4) ** 2)
    return Picture(tensors=tensors, tokens=tokens)


@torch.no_grad()
def _tiled(
    model: Any, pixels: Any, sizes: torch.Tensor, whole: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[int]]:
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    num_tiles = 1 if whole else image_size_to_num_patches(sizes[0], PINPOINTS, 16)
    tensors = {"pixel_values": pixels(num_tiles, 3, 16, 16), "image_sizes": sizes}
    features = model.model.get_image_features(**tensors, **whole, return_dict=True).pooler_output
    return tensors, [IMAGE_TOKEN] * sum(len(f) for f in features)


@dataclass(kw_only=True)
class Prompt:
    """Tokens with images among them, and what the oracle's forward takes beside the tokens."""

    family: str
    tokens: list[int] = field(default_factory=list)
    items: list[ImageItem] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """All images' tensors, as transformers takes them."""
        joined: dict[str, Any] = {}
        for name in self.pictures[0].tensors if self.pictures else ():
            parts = [p.tensors[name] for p in self.pictures]
            if name == "pixel_values" and parts[0].dim() == 4:
                height, width = (max(p.shape[d] for p in parts) for d in (2, 3))
                parts = [
                    torch.nn.functional.pad(p, (0, width - p.shape[3], 0, height - p.shape[2]))
                    for p in parts
                ]
            joined[name] = torch.cat(parts)
        if self.family in ("idefics3", "smolvlm"):
            joined = {name: tensor[None] for name, tensor in joined.items()}
        return joined

    def types(self, length: int) -> torch.Tensor:
        """1 where a token is of an image, `[1, length]`."""
        of_images = torch.zeros(1, length, dtype=torch.int64)
        of_images[0, : len(self.tokens)] = torch.tensor(self.tokens) == IMAGE_TOKEN
        return of_images

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Bidirectional ranges."""
        if self.family == "paligemma":
            return ((0, len(self.tokens)),)
        if self.family != "gemma3":
            return ()
        return tuple(
            (i.start + at, i.start + at + length) for i in self.items for at, length in i.embedded
        )


def make_prompt(
    family: str, model: Any, layout: Sequence[int | tuple[int, int]], *, seed: int = 0
) -> Prompt:
    """A prompt of parts: a number is so many random tokens, a pair an image of that size."""
    generator = torch.Generator().manual_seed(seed)
    prompt = Prompt(family=family)
    is_alone = sum(isinstance(part, tuple) for part in layout) == 1
    for number, part in enumerate(layout):
        if isinstance(part, int):
            prompt.tokens += torch.randint(5, 290, (part,), generator=generator).tolist()
        else:
            picture = make_picture(family, model, part, seed=seed * 100 + number, is_alone=is_alone)
            prompt.items.append(picture.item(len(prompt.tokens)))
            prompt.pictures.append(picture)
            prompt.tokens += picture.tokens
    return prompt


@torch.no_grad()
def oracle_logits(model: Any, prompt: Prompt, tokens: Sequence[int]) -> torch.Tensor:
    """Logits `[T, V]` of `tokens`, which begin with the prompt's, by transformers' own forward."""
    arguments = prompt.arguments
    kind = FAMILIES[prompt.family].uses_token_types
    if kind:
        types = prompt.types(len(tokens))
        if prompt.family == "paligemma":  # 0: of the prefix, 1: of the answer
            types = torch.zeros_like(types)
            types[0, len(prompt.tokens) :] = 1
        arguments[kind] = types
    if prompt.family == "llava_onevision":
        arguments["batch_num_images"] = torch.tensor([len(prompt.pictures)])
    ids = torch.tensor([list(tokens)])
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **arguments).logits[0]
    return logits.float()


def grid_positions(model: Any, prompt: Prompt) -> tuple[torch.Tensor | None, int]:
    """Positions `[3, P]` of the prompt and their delta, by transformers; None where plain."""
    if FAMILIES[prompt.family].uses_token_types != "mm_token_type_ids":
        return None, 0
    positions, delta = model.model.get_rope_index(
        torch.tensor([prompt.tokens]),
        mm_token_type_ids=prompt.types(len(prompt.tokens)),
        image_grid_thw=prompt.arguments.get("image_grid_thw"),
    )
    return positions[:, 0], int(delta.item())
