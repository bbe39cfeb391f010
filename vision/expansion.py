"""transformers' processor of a checkpoint, made without transformers' tokenizer and videos.

A processor does three things with a prompt: it makes tensors of images, writes the text that
stands for each of them, and tokenizes. The last is ours, so what it gets for a tokenizer is
`TokenNames`, which knows what tokens are called and nothing else. Loading this module is cheap;
`build_processor` brings transformers and torch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.platform.errors import ModelUnsupported
from plait.vision.recipes import Recipe

if TYPE_CHECKING:
    from plait.platform.text.tokenizer import Tokenizer

TEXT_ALONE = "With --encoder-cache-memory 0 the model serves text alone"
_PARTS = frozenset({"self", "image_processor", "tokenizer", "video_processor", "chat_template"})


class TokenNames:
    """What processors ask a tokenizer: names such as `boi_token`, and ids of tokens."""

    def __init__(self, tokenizer: Tokenizer, named: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._named = named
        self.init_kwargs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        named = self.__dict__.get("_named", {})
        if name in named:
            return named[name]
        if name.endswith("_id") and name[:-3] in named:
            return self.convert_tokens_to_ids(named[name[:-3]])
        raise AttributeError(name)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of one token; None where there is none of that name."""
        return self._tokenizer.token_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """As transformers' tokenizers are called."""
        return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}

    def add_tokens(self, *_: Any) -> int:
        """Processors add what checkpoints lack; here what lacks is missing."""
        return 0

    add_special_tokens = add_tokens


class PixtralExpansion:
    """Pixtral's processor for images; transformers' own module wants torchvision.

    Each row of patches ends with a break, the last one with an end token.
    """

    def __init__(  # noqa: PLR0913 (transformers' names, all from a file)
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **_: Any,
    ) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.patch_size = patch_size
        self.spatial_merge_size = spatial_merge_size
        self.image_token = image_token
        self.image_break_token = image_break_token
        self.image_end_token = image_end_token

    @property
    def _step(self) -> int:
        return self.patch_size * self.spatial_merge_size

    def prepare_inputs_layout(self, images: Any = None, text: Any = None) -> tuple[Any, Any]:
        """As they are."""
        return images, text

    def _merge_kwargs(self, **given: Any) -> dict[str, dict[str, Any]]:
        del given["tokenizer_init_kwargs"]
        return {"images_kwargs": given}

    def _process_images(self, images: Any, **options: Any) -> tuple[Any, list[str]]:
        made = self.image_processor(images, **{**options, "patch_size": self._step})
        return made, [self._rows(*size) for size in made["image_sizes"]]

    def _get_num_multimodal_tokens(self, image_sizes: Any) -> Any:
        from transformers.models.pixtral import image_processing_pil_pixtral as pixtral

        longest, step = self.image_processor.size["longest_edge"], self._step
        counts = []
        for size in image_sizes:
            shape = np.broadcast_to(np.uint8(0), (*size, 3))  # the function looks at nothing else
            height, width = pixtral.get_resize_output_image_size(
                shape, (longest, longest), (step, step), input_data_format="channels_last"
            )
            counts.append((height // step) * (width // step))
        return SimpleNamespace(num_image_tokens=counts)

    def _rows(self, height: int, width: int) -> str:
        rows = [self.image_token * (int(width) // self._step)] * (int(height) // self._step)
        return self.image_break_token.join(rows) + self.image_end_token


def build_processor(
    directory: Path, recipe: Recipe, tokenizer: Tokenizer, config: Mapping[str, Any]
) -> Any:
    """The processor of the checkpoint in `directory`. Raises `ModelUnsupported` by name."""
    settings = read_json(directory, "processor_config.json")
    files = [settings, *(read_json(directory, name) for name in _NAMING)]
    name = next((str(f["processor_class"]) for f in files if f.get("processor_class")), None)
    family = config.get("model_type")
    if name is not None and name not in recipe.names:
        raise ModelUnsupported(f"images of {family} are not served with a {name}. {TEXT_ALONE}")
    named = _named_tokens(directory)
    kind = _processor_class(recipe)
    taken = inspect.signature(kind.__init__).parameters.keys() - _PARTS
    options = {key: value for key, value in settings.items() if key in taken}
    _fill_llava(options, taken, config)
    parts: dict[str, Any] = {
        "image_processor": _image_processor(directory, str(family)),
        "tokenizer": TokenNames(tokenizer, named),
    }
    if "video_processor" in inspect.signature(kind.__init__).parameters:
        parts["video_processor"] = None
    try:
        return kind(**parts, **options)
    except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise ModelUnsupported(
            f"images of {family} are not served: {kind.__name__} cannot be made of the "
            f"checkpoint's files ({type(error).__name__}: {error}). {TEXT_ALONE}"
        ) from error


_NAMING = ("preprocessor_config.json", "tokenizer_config.json")


def import_processor(recipe: Recipe) -> None:
    """What takes a second or two of `build_processor`, and needs no tokenizer."""
    from transformers import AutoImageProcessor  # noqa: F401

    _processor_class(recipe)


def _processor_class(recipe: Recipe) -> type[Any]:
    """One that takes our tokenizer for transformers', and no video processor."""
    if not recipe.processor:
        return PixtralExpansion
    import transformers

    base: type[Any] = getattr(transformers, recipe.processor)
    taking = {"check_argument_for_proper_class": lambda _self, _name, part: type(part)}
    return type(base.__name__, (base,), taking)


def _image_processor(directory: Path, family: str) -> Any:
    from transformers import AutoImageProcessor

    try:
        # By Pillow and numpy always: what an image becomes must not hang on what is installed.
        load: Any = AutoImageProcessor.from_pretrained
        return load(directory, backend="pil", local_files_only=True, trust_remote_code=False)
    except (AttributeError, ImportError, LookupError, OSError, TypeError, ValueError) as error:
        raise ModelUnsupported(
            f"images of {family} are not served: the checkpoint has no image processor that can "
            "be used (preprocessor_config.json); "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}. {TEXT_ALONE}"
        ) from error


def _fill_llava(options: dict[str, Any], taken: Any, config: Mapping[str, Any]) -> None:
    """What checkpoints of LLaVA's first year have in their model's config alone."""
    vision = config.get("vision_config") or {}
    known = {
        "patch_size": vision.get("patch_size"),
        "vision_feature_select_strategy": config.get("vision_feature_select_strategy"),
        "num_additional_image_tokens": 1 if "clip" in str(vision.get("model_type")) else None,
    }
    if config.get("model_type") in ("llava", "llava_next"):
        for key, value in known.items():
            if key in taken and options.get(key) is None and value is not None:
                options[key] = value


def _named_tokens(directory: Path) -> dict[str, str]:
    """Texts of tokens by the names that the checkpoint's files give them."""
    config = read_json(directory, "tokenizer_config.json")
    sources: Sequence[Any] = (
        read_json(directory, "special_tokens_map.json"),
        config,
        config.get("model_specific_special_tokens"),
        config.get("extra_special_tokens"),
    )
    named: dict[str, str] = {}
    for source in sources:
        for key, value in source.items() if isinstance(source, Mapping) else ():
            text = value.get("content") if isinstance(value, Mapping) else value
            if key.endswith("_token") and isinstance(text, str):
                named[key] = text
    return named


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The object in a file of the checkpoint; empty where there is no such file."""
    try:
        found = json.loads((directory / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{name} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
