"""Where a model comes from: a directory, a GGUF file, a hub id, or the embedded default.

A local path never touches the network, and `HF_HUB_OFFLINE=1` keeps a hub id to what is cached.
No code from a checkpoint is ever run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
)

from plait.platform.config import Options
from plait.platform.errors import ModelUnsupported
from plait.platform.model.families import FAMILIES, VisionFamily, family_of
from plait.platform.model.locating import Located, locate
from plait.platform.model.quantized_files import check_method


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files are here and whose class is known; nothing of it is loaded yet."""

    path: Path  # a directory, or a GGUF file
    kind: str  # directory | hub | gguf | embedded
    name: str  # as the user would call it; never a path with folders
    config: PreTrainedConfig
    model_class: type[Any]
    eos_token_ids: tuple[int, ...]
    quantization: dict[str, Any] | None = None  # quantization_config, of a method that is read
    vision: VisionFamily | None = None  # where it takes images
    notes: tuple[str, ...] = ()

    @property
    def is_gguf(self) -> bool:
        """Whether the path is a GGUF file rather than a directory."""
        return self.path.is_file()

    @property
    def text_config(self) -> PreTrainedConfig:
        """Of the language model."""
        return self.config.get_text_config() if self.vision else self.config


def find_checkpoint(options: Options, located: Located | None = None) -> Checkpoint:
    """Find the files of `options.model`, if they are not `located`, and read its config.

    Raises `ConfigError` where nothing is found, `ModelUnsupported` where it cannot be served.
    """
    found = located or locate(options)
    path, kind, name = found.path, found.kind, found.name
    no_notes: tuple[str, ...] = ()
    if path.is_file():
        from plait.platform.model.gguf import read_gguf_config

        raw, notes = read_gguf_config(path), no_notes
    else:
        raw, notes = _read_config(path, name)
    quantization = _quantization(raw)
    config = _parse_config(raw, path, name)
    vision = _vision_family(raw, config)
    return Checkpoint(
        path=path,
        kind=kind,
        name=name,
        config=config,
        model_class=_model_class(raw, config, name, vision),
        eos_token_ids=_eos_token_ids(path, config),
        quantization=quantization,
        vision=vision,
        notes=notes,
    )


def _read_config(directory: Path, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    path = directory / "config.json"
    if not path.exists():
        raise ModelUnsupported(f"{name} has no config.json", param="model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelUnsupported(f"{name}: config.json cannot be read: {error}") from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise ModelUnsupported(f"{name}: config.json names no model_type")
    if "auto_map" not in raw:
        return raw, ()
    if raw["model_type"] not in CONFIG_MAPPING:
        raise ModelUnsupported(
            f"{name} brings its own code (auto_map) for model type '{raw['model_type']}', and code "
            "from a checkpoint is never run; use a version of it that transformers itself has"
        )
    note = f"the code in {name} (auto_map) is not run; transformers' own classes are used"
    return {k: v for k, v in raw.items() if k != "auto_map"}, (note,)


def _parse_config(raw: dict[str, Any], path: Path, name: str) -> PreTrainedConfig:
    model_type = raw["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ModelUnsupported(
            f"{name}: transformers knows no model type '{model_type}'; a newer release might"
        )
    try:
        config_class = CONFIG_MAPPING[model_type]
        if path.is_file():
            return config_class.from_dict(dict(raw))
        config = config_class.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelUnsupported(f"{name}: its config is not valid: {error}") from error
    config.__dict__.pop("quantization_config", None)  # `Checkpoint.quantization` has it
    return config


def _quantization(raw: dict[str, Any]) -> dict[str, Any] | None:
    """How the weights are quantised, if we can read that; some checkpoints say it further in."""
    text = raw.get("text_config") or {}
    if not isinstance(text, dict):
        raise ModelUnsupported(f"config.json: text_config is {text!r:.40}, and no mapping")
    found = raw.get("quantization_config") or text.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ModelUnsupported(f"quantization_config is no mapping but {found!r:.40}")
    check_method(found)
    return dict(found)


def _vision_family(raw: dict[str, Any], config: PreTrainedConfig) -> VisionFamily | None:
    """How the model takes images; None where it takes none.

    Raises `ModelUnsupported` where it takes something that is not served.
    """
    tower = getattr(config, "vision_config", None)
    is_plain = tower is None and config.get_text_config() is config
    if is_plain or getattr(config, "is_encoder_decoder", False):
        return None
    family = family_of(config.model_type, getattr(tower, "model_type", ""))
    if family is None or tower is None or getattr(config, "audio_config", None) is not None:
        raise ModelUnsupported(
            f"{_shown(raw, config)} takes images or other inputs in a way that is not served "
            f"(model type '{config.model_type}'; served are {', '.join(FAMILIES)})"
        )
    return family


def _shown(raw: dict[str, Any], config: PreTrainedConfig) -> str:
    """What to call the model's class in messages."""
    named = _architectures(raw)
    return named[0] if named else str(config.model_type)


def _architectures(raw: dict[str, Any]) -> list[str]:
    """What the checkpoint calls the classes that it was saved from. Raises `ModelUnsupported`."""
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise ModelUnsupported(f"config.json: architectures is {named!r:.40}, and no list of names")
    return [str(name) for name in named]


def _model_class(
    raw: dict[str, Any], config: PreTrainedConfig, name: str, vision: VisionFamily | None
) -> type[Any]:
    architectures = _architectures(raw)
    shown = _shown(raw, config)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{shown} is an encoder-decoder model; only decoders are served")
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if vision else MODEL_FOR_CAUSAL_LM_MAPPING
    found: Any = mapping.get(type(config), None)
    if found is None:
        raise ModelUnsupported(f"{name} ({shown}) is no causal language model in transformers")
    model_class: type[Any] = found[0] if isinstance(found, tuple) else found
    if architectures and shown != model_class.__name__ and (vision or not _is_causal(shown)):
        raise ModelUnsupported(
            f"{name} holds a {shown}, not a language model with a head ({model_class.__name__})"
        )
    return model_class


def _is_causal(architecture: str) -> bool:
    return "CausalLM" in architecture or "LMHead" in architecture


def _eos_token_ids(path: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """End tokens of the config and of generation_config.json, first named first."""
    found: list[int] = []
    generation = path / "generation_config.json"
    sources: list[Any] = [
        getattr(part, "eos_token_id", None) for part in (config, config.get_text_config())
    ]
    if path.is_dir() and generation.exists():
        try:
            sources.insert(0, json.loads(generation.read_text()).get("eos_token_id"))
        except (ValueError, OSError, AttributeError) as error:
            raise ModelUnsupported(f"generation_config.json cannot be read: {error}") from error
    for value in sources:
        for token in value if isinstance(value, list | tuple) else [value]:
            if isinstance(token, int) and token >= 0 and token not in found:
                found.append(token)
    return tuple(found)
