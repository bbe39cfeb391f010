"""What can be said of a model's images before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.platform.errors import ModelUnsupported
from plait.vision.expansion import TEXT_ALONE, read_json
from plait.vision.recipes import NEEDS_TORCHVISION

if TYPE_CHECKING:
    from plait.platform.config import Options, VisionInfo


def check_family(options: Options) -> None:
    """Refuse a model whose images nothing here can process. Raises `ModelUnsupported`.

    Nothing is said of a model whose config cannot be had: whoever loads it knows why.
    """
    if options.model is None or options.encoder_cache_bytes == 0:
        return
    family = _config(options.model, options.revision).get("model_type")
    if family in NEEDS_TORCHVISION:
        raise ModelUnsupported(
            f"images of {family} are not served: transformers processes them by torchvision "
            f"alone. {TEXT_ALONE}"
        )


def check_processor(options: Options, directory: Path, vision: VisionInfo) -> None:
    """Make the processor of a checkpoint's images and try it. Raises `ModelUnsupported`."""
    from plait.platform.text.tokenizer import Tokenizer
    from plait.vision.processor import ImageProcessor

    tokenizer = Tokenizer.load(directory, chat_template=options.chat_template)
    ImageProcessor.load(directory, tokenizer, vision).close()


def _config(model: str, revision: str | None) -> Mapping[str, Any]:
    path = Path(model).expanduser()
    if path.is_file():
        return {}  # GGUF, whose models serve text
    try:
        return read_json(path if path.is_dir() else _of_hub(model, revision), "config.json")
    except (ModelUnsupported, OSError, ValueError):
        return {}


def _of_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json", revision=revision)).parent
