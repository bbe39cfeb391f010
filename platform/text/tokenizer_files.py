"""Finds and reads what a tokenizer is made of: directory, hub snapshot or GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.platform.errors import ConfigError, ModelUnsupported
from plait.platform.text.chat_templates import ChatTemplates

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# What a hub snapshot needs for tokenization; weights are somebody else's.
_HUB_PATTERNS = [
    "tokenizer*", "*token*.json", "chat_template*", "additional_chat_templates/*",
    "config.json", "generation_config.json", "vocab*", "merges.txt", "*.model", "*.tiktoken",
]  # fmt: skip
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")

# It has no chats, and no template: an answer follows one question about images before it.
_PALIGEMMA = (
    "{% if messages | length != 1 %}{{ raise_exception('this model answers one message with "
    "images, and takes no others') }}{% endif %}{% set content = messages[0].content %}"
    "{% if content is string %}{{ content }}{% else %}"
    "{% for part in content if part.type == 'image' %}<image>{% endfor %}"
    "{% for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer's parts, read and checked; not changed afterwards."""

    backend: Backend
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_templates: ChatTemplates = field(default_factory=lambda: ChatTemplates({}, {}))


def read_tokenizer_files(
    source: str | Path,
    *,
    gguf_file: str | None = None,
    chat_template: str | None = None,
    revision: str | None = None,
) -> TokenizerFiles:
    """See `Tokenizer.load`."""
    override = None if chat_template is None else _template_text(chat_template)
    path = Path(source)
    if path.is_file():
        return _from_gguf(path, override)
    directory = path if path.is_dir() else _snapshot(str(source), gguf_file, revision)
    if gguf_file is not None:
        return _from_gguf(directory / gguf_file, override)
    return _from_directory(directory, override)


def _template_text(given: str) -> str:
    """The template given by file name or as text (which has braces or several lines)."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--chat-template: {given!r} is no readable file ({error.strerror}) and no template",
            param="chat_template",
        ) from error


def _snapshot(repo_id: str, gguf_file: str | None, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = _HUB_PATTERNS if gguf_file is None else [gguf_file]
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelUnsupported(
            f"{repo_id!r} is neither a directory, a GGUF file nor a hub id"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelUnsupported(
            f"{repo_id!r} is not in the local hub cache and cannot be fetched (offline, or "
            "HF_HUB_OFFLINE=1): give a local directory, or fetch it first"
        ) from error
    except OSError as error:
        raise ModelUnsupported(f"{repo_id!r} cannot be fetched from the hub: {error}") from error


def _from_directory(directory: Path, override: str | None) -> TokenizerFiles:
    config = _read_json(directory / "tokenizer_config.json")
    named = _named_tokens(config, _read_json(directory / "special_tokens_map.json"))
    backend = _backend(directory, config, named)
    sources = _chat_templates(directory, config) if override is None else {"default": override}
    return TokenizerFiles(
        backend=backend,
        bos_token_id=backend.token_to_id(named["bos_token"]) if "bos_token" in named else None,
        eos_token_ids=_eos_token_ids(directory, backend, named),
        chat_templates=ChatTemplates(sources, named),
    )


def _from_gguf(path: Path, override: str | None) -> TokenizerFiles:
    from plait.platform.text.gguf_tokenizer import GGUFVocabulary

    vocabulary = GGUFVocabulary(path)
    named = vocabulary.named_tokens()
    sources = vocabulary.chat_templates() if override is None else {"default": override}
    return TokenizerFiles(
        backend=vocabulary.backend(),
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.eos_token_ids(),
        chat_templates=ChatTemplates(sources, named),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelUnsupported(f"{path.name} is no valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _named_tokens(*configs: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, as text; earlier files win."""
    found: dict[str, str] = {}
    for config in reversed(configs):
        for name in _NAMED_TOKENS:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _backend(directory: Path, config: dict[str, Any], named: dict[str, str]) -> Backend:
    from tokenizers import Tokenizer as Backend

    file = directory / "tokenizer.json"
    if not file.is_file():
        return _converted(directory)
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelUnsupported(f"tokenizer.json cannot be read: {error}") from error
    backend.no_truncation()  # never cut a prompt in silence
    backend.no_padding()
    _add_missing_tokens(backend, config, named)
    _apply_bos_and_eos(backend, config, named)
    return backend


def _converted(directory: Path) -> Backend:
    """A checkpoint without tokenizer.json: transformers converts its older formats."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise ModelUnsupported(
            f"no tokenizer.json in the checkpoint, and its tokenizer cannot be converted: {error}"
        ) from error
    backend: Backend | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelUnsupported(f"{type(tokenizer).__name__} has no fast tokenizer")
    return backend


def _add_missing_tokens(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json lists; their ids must come out as it says."""
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token_id, entry in sorted(
        ((int(key), value) for key, value in config.get("added_tokens_decoder", {}).items()),
    ):
        content = entry["content"]
        known = backend.token_to_id(content)
        if known is None or token_id not in backend.get_added_tokens_decoder():
            options = {flag: bool(entry.get(flag, False)) for flag in flags}
            backend.add_tokens([AddedToken(content, **options)])
        if backend.token_to_id(content) != token_id:
            raise ModelUnsupported(
                f"tokenizer_config.json gives {content!r} the id {token_id}, but tokenizer.json "
                f"makes it {backend.token_to_id(content)}"
            )
    special = [text for text in named.values() if backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])


def _apply_bos_and_eos(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """`add_bos_token` / `add_eos_token` of tokenizer_config.json, where it sets them."""
    if not {"add_bos_token", "add_eos_token"} & config.keys():
        return
    head = [named["bos_token"]] if config.get("add_bos_token") and "bos_token" in named else []
    tail = [named["eos_token"]] if config.get("add_eos_token") and "eos_token" in named else []
    set_post_processor(backend, head, tail)


def set_post_processor(backend: Backend, head: list[str], tail: list[str]) -> None:
    """Put these special tokens before and behind each encoded text."""
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=[*head, "$A", *tail],
        pair=[*head, "$A", *tail, "$B"],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*head, *tail}],
    )


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; a file of its own wins over tokenizer_config.json."""
    found: dict[str, str] = {}
    # A vision-language model's processor has the latter, which knows images; the tokenizer's own
    # may be that of the language model it was made from.
    value = _read_json(directory / "chat_template.json").get("chat_template") or config.get(
        "chat_template"
    )
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        found.update({entry["name"]: entry["template"] for entry in value})
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    own = directory / "chat_template.jinja"
    if own.is_file():
        found["default"] = own.read_text(encoding="utf-8")
    if not found and _read_json(directory / "config.json").get("model_type") == "paligemma":
        found["default"] = _PALIGEMMA
    if found and "default" not in found:
        found["default"] = next(iter(found.values()))
    return found


def _eos_token_ids(directory: Path, backend: Backend, named: dict[str, str]) -> tuple[int, ...]:
    """The tokenizer's end token, and those of the generation (else the model) config."""
    ids = {backend.token_to_id(named["eos_token"])} if "eos_token" in named else set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
            break
    return tuple(sorted(i for i in ids if isinstance(i, int)))
