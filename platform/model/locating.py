"""Where the files of a model are, which may be fetched from the hub first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from plait.platform.config import Options
from plait.platform.demo.embedded import SERVED_NAME, model_path
from plait.platform.errors import ConfigError, ModelUnsupported

_HUB_FILES = (
    "config.json",
    "adapter_config.json",  # of an adapter, to say that it is one
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Files of a model that are here."""

    path: Path  # a directory, or a GGUF file
    kind: str  # directory | hub | gguf | embedded
    name: str  # as the user would call it; never a path with folders


def locate(options: Options) -> Located:
    """Where the files of `options.model` lie, fetched if need be; nothing of them is read yet.

    Raises `ConfigError` where nothing is found.
    """
    path, kind, name = _locate(options)
    return Located(path=path, kind=kind, name=name)


def _locate(options: Options) -> tuple[Path, str, str]:
    if options.model is None:
        return model_path(), "embedded", SERVED_NAME
    path = Path(options.model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"{path.name} is not a model: name a directory, a .gguf file or a hub id",
                param="model",
            )
        return path, "gguf", path.stem
    if path.is_dir():
        return _inside(path)
    if path.suffix == ".gguf" or not _is_hub_id(options.model):
        raise ConfigError(f"there is no file or directory {options.model}", param="model")
    directory = _download(options.model, options.revision)
    _refuse_adapter(directory, options.model)
    return directory, "hub", options.model


def _inside(directory: Path) -> tuple[Path, str, str]:
    """The model in a directory: its config.json, or else its only GGUF file."""
    name = directory.resolve().name
    if (directory / "config.json").exists():
        return directory, "directory", name
    _refuse_adapter(directory, str(directory))
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0], "gguf", files[0].stem
    if files:
        listed = ", ".join(f.name for f in files)
        raise ConfigError(f"{name} holds several GGUF files; name one of: {listed}", param="model")
    raise ModelUnsupported(f"{name} holds no config.json and no GGUF file", param="model")


def _refuse_adapter(directory: Path, where: str) -> None:
    """Raises `ModelUnsupported` where the files are an adapter's, with what would serve it."""
    try:
        raw = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if (directory / "config.json").exists() or not isinstance(raw, dict):
        return
    named = raw.get("base_model_name_or_path")
    base = named[:200] if isinstance(named, str) and named else None
    name = directory.resolve().name if Path(where).is_dir() else where
    whose = f"of {base}" if base else "and does not say of which model"
    raise ModelUnsupported(
        f"{name} is an adapter {whose}, not a model; load it on its base: plait serve "
        f"{base or 'BASE'} --adapter NAME={where}, or LLM({base or 'BASE'!r}, "
        f"adapters={{'NAME': {where!r}}})",
        param="model",
    )


def _is_hub_id(text: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = snapshot_download(hub_id, revision=revision, allow_patterns=list(_HUB_FILES))
    except LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ConfigError(
            f"{hub_id} is neither a local path nor in the hub cache, and {reason}", param="model"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{hub_id} could not be fetched: {error}", param="model") from error
    return Path(path)
