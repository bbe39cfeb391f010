"""The embedded model with sight: an ordinary LLaVA checkpoint, made once from its parts.

The language model comes from the GGUF file, the tower and its projector from `parts/vision`, which
says the rest too: the image token, how messages with pictures read, how pictures are prepared. What
is made stands in a folder named by the parts' content, so a new version of any makes a new one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.platform.demo.embedded import model_path
from plait.platform.errors import ConfigError
from plait.platform.starting.cache_folder import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

    from plait.platform.text.gguf_tokenizer import GGUFVocabulary

PARTS = Path(__file__).parent / "parts"
VISION = PARTS / "vision"

_FORM = 1  # of what is written; another number makes the checkpoint anew
_PREPROCESSOR = "preprocessor_config.json"
_CONTENT = "content.jinja"  # a macro of that name, for what a message holds
_HEAD_BYTES = 1 << 20  # of the GGUF file, which is not read whole at every start
_MAKING = ".making-"
_STALE_S = 24 * 3600
_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"  # written last: a folder with it is whole


def assemble(
    folder: Path | None = None, *, tell: Callable[[str], None] = lambda _text: None
) -> Path:
    """The checkpoint's directory, below `folder` (by default the user's cache); made if absent.

    `tell` hears that it is to be made, which takes seconds. Raises `ConfigError` where the embedded
    model is not installed, or where the folder cannot be written.
    """
    file = model_path()
    folder = folder or cache_folder("demo")
    target = folder / f"{file.stem.split('.')[0]}-vision-{_digest(file)}"
    if (target / _CONFIG).is_file():
        return target
    tell(f"putting the embedded model and its vision tower together, once, in {folder}")
    try:
        _make(file, target)
    except OSError as error:
        raise ConfigError(
            f"the embedded model cannot be put together in {folder}: {_reason(error)}. Set "
            "XDG_CACHE_HOME to a folder with 300 MB to write to, or name a model",
            param="model",
        ) from error
    return target


def _make(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{_MAKING}*"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=_MAKING, dir=target.parent))
    try:
        making.chmod(0o755)
        _write(file, making)
        _put(making, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _digest(file: Path) -> str:
    digest = hashlib.sha256(f"{_FORM} {file.stat().st_size}".encode())
    with file.open("rb") as opened:
        digest.update(opened.read(_HEAD_BYTES))
    for name in (_CONFIG, _WEIGHTS, _PREPROCESSOR, _CONTENT):
        digest.update(f"\0{name}\0".encode() + (VISION / name).read_bytes())
    return digest.hexdigest()[:16]


def _put(making: Path, target: Path) -> None:
    """Rename the finished folder; another process may have been faster."""
    try:
        making.replace(target)
    except OSError:
        if not (target / _CONFIG).is_file():
            raise


def _write(file: Path, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    shutil.copyfile(VISION / _PREPROCESSOR, folder / _PREPROCESSOR)
    facts = json.loads((VISION / _CONFIG).read_text())
    tokenizer = _write_tokenizer(file, folder, facts["image_token"])
    tensors = dict(_language_model(file))
    tensors.update(load_file(VISION / _WEIGHTS))
    try:
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # as it calls a full disk
        raise OSError(str(error)) from error
    (folder / _WEIGHTS).chmod(0o644)
    _write_json(folder / "processor_config.json", _processor(facts))
    _write_json(folder / _CONFIG, _config(file, facts, tokenizer))


def _language_model(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Its parameters in float16, by the names that LLaVA checkpoints have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from plait.platform.model.gguf import GgufFile, read_gguf_config

    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = make(AutoConfig.for_model(**read_gguf_config(file)))
    tensors = GgufFile(file, model)
    for name in tensors.shapes:
        yield f"language_model.{name}", tensors.read(name).half().contiguous()


def _write_tokenizer(file: Path, folder: Path, image_token: str) -> dict[str, int]:
    """Returns the ids that the model's config names."""
    from plait.platform.text.gguf_tokenizer import GGUFVocabulary

    vocabulary = GGUFVocabulary(file)
    backend = vocabulary.backend()
    # Not by its own `save`, which calls a full disk a bare `Exception`.
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    named = vocabulary.named_tokens()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192}
    (folder / "chat_template.jinja").write_text(_template(vocabulary), encoding="utf-8")
    settings |= {"clean_up_tokenization_spaces": False, "image_token": image_token, **named}
    _write_json(folder / "tokenizer_config.json", settings)
    ends = list(vocabulary.eos_token_ids())
    _write_json(folder / "generation_config.json", {"eos_token_id": ends})
    token_id = backend.token_to_id(image_token)
    assert token_id is not None, f"{image_token} is a token of the embedded model"
    return {"image_token_index": token_id}


def _template(vocabulary: GGUFVocabulary) -> str:
    """The language model's own, whose messages may hold pictures."""
    (own,) = vocabulary.chat_templates().values()
    held = "message['content']"
    assert held in own, "the embedded model's template puts contents in as they are"
    return (VISION / _CONTENT).read_text().strip() + own.replace(held, f"content({held})")


def _processor(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "processor_class": "LlavaProcessor",
        "image_token": facts["image_token"],
        "patch_size": facts["vision_config"]["patch_size"],
        "vision_feature_select_strategy": facts["vision_feature_select_strategy"],
        "num_additional_image_tokens": 1,  # the class token, which is not selected
    }


def _config(file: Path, facts: dict[str, Any], tokenizer: dict[str, int]) -> dict[str, Any]:
    from plait.platform.model.gguf import read_gguf_config

    language = read_gguf_config(file)
    vision = facts["vision_config"]
    rest = {key: value for key, value in facts.items() if key != "image_token"}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "float16",
        "text_config": {"architectures": ["LlamaForCausalLM"], **language},
        "tie_word_embeddings": language["tie_word_embeddings"],
        "image_seq_length": (vision["image_size"] // vision["patch_size"]) ** 2,
        **tokenizer,
        **rest,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
