"""The parts of a vision-language model, and the run of its tower over images.

`find_parts` tells where a family keeps its language model, tower and projector. `ImageEncoder`
turns `ImageItem`s into embeddings by the family's own `get_image_features`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.adapters.sites import SitePart
from plait.platform.config import VisionInfo
from plait.platform.core import AdapterUse, Array, ImageItem
from plait.platform.errors import InternalError, ModelUnsupported
from plait.platform.model.families import VisionFamily
from plait.platform.model.tower import TowerStep
from plait.platform.ops.lora import PlacedLora

_LANGUAGE = ("language_model", "text_model")
_TOWERS = ("vision_tower", "visual", "vision_model")
_PROJECTORS_IN_TOWER = ("merger", "deepstack_merger_list")  # of the Qwen and GLM families


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionParts:
    """Where the parts of a conditional-generation model are."""

    family: VisionFamily
    root: Any  # what holds them all and has `get_image_features`
    root_name: str
    language_name: str  # within root
    tower_name: str  # within root

    @property
    def language(self) -> Any:
        """The backbone that turns embeddings into hidden rows."""
        return getattr(self.root, self.language_name)

    @property
    def tower(self) -> Any:
        """The vision tower."""
        return getattr(self.root, self.tower_name)

    @property
    def encoding(self) -> list[nn.Module]:
        """The modules beside the language model."""
        return [m for name, m in self.root.named_children() if name != self.language_name]

    def part_of(self, name: str) -> SitePart:
        """The part that a module of the whole model belongs to, by its full name."""
        if not name.startswith(f"{self.root_name}."):
            return SitePart.LANGUAGE  # the head
        first, _, rest = name[len(self.root_name) + 1 :].partition(".")
        if first == self.language_name:
            return SitePart.LANGUAGE
        if first == self.tower_name and rest.partition(".")[0] not in _PROJECTORS_IN_TOWER:
            return SitePart.TOWER
        return SitePart.PROJECTOR


def find_parts(model: Any, root_name: str, family: VisionFamily) -> VisionParts:
    """Find the parts of a model that was just built.

    Raises `ModelUnsupported` where it does not have them under transformers' names.
    """
    name = type(model).__name__
    root = getattr(model, root_name)
    found = {
        kind: next((n for n in names if isinstance(getattr(root, n, None), nn.Module)), None)
        for kind, names in (("language model", _LANGUAGE), ("vision tower", _TOWERS))
    }
    for kind, part in found.items():
        if part is None:
            raise ModelUnsupported(f"{name} is not served: its {kind} was not found")
    language, tower = found["language model"], found["vision tower"]
    assert language is not None
    assert tower is not None
    if not hasattr(root, "get_image_features"):
        raise ModelUnsupported(f"{name} is not served: it has no get_image_features")
    for module in getattr(root, tower).modules():
        if type(module).__name__.endswith("Attention") and not _uses_interface(module):
            raise ModelUnsupported(
                f"{name} is not served: {type(module).__name__} of its tower does not go through "
                "transformers' attention interface"
            )
    return VisionParts(
        family=family, root=root, root_name=root_name, language_name=language, tower_name=tower
    )


def _uses_interface(module: nn.Module) -> bool:
    """Does the forward of an attention module of a tower look its function up there?"""
    return "ALL_ATTENTION_FUNCTIONS" in type(module).forward.__code__.co_names


def vision_info(parts: VisionParts, model: Any) -> VisionInfo:
    """What the rest of Plait needs to know of the model's vision."""
    config = model.config
    levels = 1
    if parts.family.has_levels:
        levels += len(config.vision_config.deepstack_visual_indexes)
    token = getattr(config, "image_token_id", None)
    if token is None:
        token = getattr(config, "image_token_index", None)
    if not isinstance(token, int):
        raise ModelUnsupported(f"{type(model).__name__}'s config names no image token")
    return VisionInfo(
        family=config.model_type,
        hidden_size=config.get_text_config().hidden_size,
        num_levels=levels,
        image_token_id=token,
        has_grid_positions=parts.family.has_grid_positions,
        bidirectional=parts.family.bidirectional,
    )


FindAdapter = Callable[[str], PlacedLora | None]


class ImageEncoder:
    """Runs a model's tower and projector. Not for several threads."""

    def __init__(
        self, parts: VisionParts, info: VisionInfo, dtype: torch.dtype, step: TowerStep,
        find_adapter: FindAdapter, release: Callable[[], None],
    ) -> None:  # fmt: skip
        """`find_adapter` gives a generation's changes of tower and projector, None without."""
        self._parts = parts
        self._info = info
        self._dtype = dtype
        self._step = step
        self._find_adapter = find_adapter
        self._release = release
        if info.family == "mistral3":
            # transformers drops a leading dimension of one that is not there: of an image of one
            # embedding it would drop the row.
            parts.root.multi_modal_projector.register_forward_hook(lambda *call: call[-1][None])

    @property
    def root(self) -> Any:
        """What has `get_image_features`."""
        return self._parts.root

    def encode(
        self, items: Sequence[ImageItem], adapters: Sequence[Sequence[AdapterUse]]
    ) -> list[Tensor]:
        """Embeddings `[num_embeds, levels * D]` of each item, levels side by side.

        `adapters`: those of each item's request, or empty where nobody has any. One that becomes
        active only after the image does not change it. Items that fit together run together; an
        item's bits do not depend on that.
        """
        groups: dict[Any, list[int]] = {}
        tensors = [self._tensors(item) for item in items]
        uses = [self._changes(item, a) for item, a in zip(items, adapters, strict=True)] if (
            adapters
        ) else [()] * len(items)  # fmt: skip
        for i, (given, changes) in enumerate(zip(tensors, uses, strict=True)):
            shape = tuple((name, t.shape[1:], t.dtype) for name, t in given.items())
            active = tuple((id(placed), scale) for placed, scale in changes)
            groups.setdefault((shape, self._kind(given), active), []).append(i)
        out: dict[int, Tensor] = {}
        for members in groups.values():
            self._step.begin(uses[members[0]])
            try:
                rows = self._run([tensors[i] for i in members])
            finally:
                self._step.begin(())
                self._release()
            out.update(zip(members, self._split(rows, [items[i] for i in members]), strict=True))
        return [out[i] for i in range(len(items))]

    def _tensors(self, item: ImageItem) -> dict[str, Tensor]:
        wanted = self._parts.family.tensors
        missing = [name for name in wanted if name not in item.tensors]
        if missing:
            raise InternalError(f"image {item.key[:12]} comes without {', '.join(missing)}")
        given = {name: array_tensor(item.tensors[name]) for name in wanted}
        return {n: t.to(self._dtype) if t.is_floating_point() else t for n, t in given.items()}

    def _changes(
        self, item: ImageItem, adapters: Iterable[AdapterUse]
    ) -> tuple[tuple[PlacedLora, float], ...]:
        found = (
            (self._find_adapter(use.generation), use.scale)
            for use in adapters
            if use.active_from <= item.start
        )
        return tuple((placed, scale) for placed, scale in found if placed is not None)

    def _kind(self, given: Mapping[str, Tensor]) -> bool:
        """Images that LLaVA-OneVision does not cut into tiles do not run with those it does."""
        return self._info.family == "llava_onevision" and len(given["pixel_values"]) == 1

    def _run(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The tower over all of them; rows `[sum of num_embeds, levels * D]`."""
        family = self._parts.family
        joined: dict[str, Any] = {
            name: torch.cat([item[name] for item in items]) for name in family.tensors
        }
        if family.is_nested:
            joined = {name: tensor[None] for name, tensor in joined.items()}
        if self._kind(items[0]):  # more images than one in the prompt: none of them is cut
            joined["batch_num_images"] = [len(items) + 1]
        output = self._parts.root.get_image_features(**joined, return_dict=True)
        levels = [rows_of(output.pooler_output)]
        if family.has_levels:
            levels += [rows_of(level) for level in output.deepstack_features]
        if len(levels) != self._info.num_levels:
            raise InternalError(f"the tower gave {len(levels)} of {self._info.num_levels} levels")
        return torch.cat(levels, dim=1)

    def _split(self, rows: Tensor, items: Sequence[ImageItem]) -> list[Tensor]:
        """Each item's rows, in memory of its own."""
        wanted = [item.num_embeds for item in items]
        if len(rows) != sum(wanted):
            keys = ", ".join(item.key[:12] for item in items)
            raise InternalError(
                f"the tower made {len(rows)} embeddings of images {keys}, their prompts have room "
                f"for {sum(wanted)}"
            )
        parts = rows.split(wanted)
        return [rows] if len(parts) == 1 else [part.clone() for part in parts]


def rows_of(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Features of images as rows, in order."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def array_tensor(array: Array) -> Tensor:
    """The array as a tensor of its own memory."""
    flat = np.frombuffer(array.data, dtype=np.dtype(array.dtype))
    return torch.from_numpy(flat.reshape(array.shape).copy())
