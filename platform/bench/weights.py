"""One model in the precisions that engines read, all made from one GGUF file.

So every engine gets the same numbers, as far as its format holds them: a Q4_0 file is requantised
from what the Q4_1 file says, and the bfloat16 checkpoint holds that too.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from plait.platform.errors import ConfigError, ModelUnsupported

_KINDS = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "bf16.gguf": gguf.GGMLQuantizationType.BF16,
}
# `general.file_type` of these.
_FILE_TYPES = {
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "bf16.gguf": gguf.LlamaFileType.MOSTLY_BF16,
}
_NOT_COPIED = ("general.architecture", "general.alignment", "general.file_type")
_BLOCK = 32


def make(source: Path, kind: str, folder: Path) -> Path:
    """The weights of `source` as `kind`; what was made before is found in `folder`.

    Args:
        source: A GGUF file; or a checkpoint's directory, from which "bf16" alone can be had.
        kind: "bf16" (a checkpoint as on the hub) or one of q4_0, q4_1, q8_0, bf16.gguf.
        folder: Made where it is missing.

    Raises:
        ConfigError: `source` is neither, or `kind` cannot be made from it.
    """
    if source.is_dir() and kind == "bf16":
        return source
    if source.suffix != ".gguf" or not source.is_file():
        raise ConfigError(f"{source} is no GGUF file, from which {kind} is made", param="model")
    if kind in _KINDS and _kind_of(source) is _KINDS[kind]:
        return source
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    suffix = "" if kind == "bf16" else f".{kind.removesuffix('.gguf')}.gguf"
    target = folder / f"{source.stem.split('.')[0]}-{digest}{suffix}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(target.name + ".part")
    if kind == "bf16":
        shutil.rmtree(unfinished, ignore_errors=True)
        _write_checkpoint(source, unfinished)
    else:
        _requantise(source, unfinished, kind)
    return unfinished.rename(target)


def _matrices(reader: Any) -> Counter[Any]:
    """Values by type, of the matrices inside layers."""
    counts: Counter[Any] = Counter()
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            counts[tensor.tensor_type] += tensor.n_elements
    return counts


def _kind_of(path: Path) -> Any:
    """The type that most of the layers' matrices have."""
    return _matrices(gguf.GGUFReader(path)).most_common(1)[0][0]


def _requantise(source: Path, target: Path, kind: str) -> None:
    """Copy a file; matrices of its main type get another, all else stays, embeddings too."""
    reader = gguf.GGUFReader(source)
    main = _matrices(reader).most_common(1)[0][0]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(_FILE_TYPES[kind])
    for name, value in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _NOT_COPIED:
            is_array = value.types[0] is gguf.GGUFValueType.ARRAY
            writer.add_key_value(
                name,
                value.contents(),
                value.types[0],
                sub_type=value.types[-1] if is_array else None,
            )
    for tensor in reader.tensors:
        data, type_ = tensor.data, tensor.tensor_type
        if type_ is main and len(tensor.shape) > 1 and int(tensor.shape[0]) % _BLOCK == 0:
            values = gguf.dequantize(data, type_).astype(np.float32)
            data, type_ = gguf.quantize(values, _KINDS[kind]), _KINDS[kind]
        writer.add_tensor(tensor.name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_checkpoint(source: Path, target: Path) -> None:
    """Config, tokenizer and bfloat16 weights, as transformers saves them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    from plait.platform.text.tokenizer_files import read_tokenizer_files

    # What `from_pretrained(…, gguf_file=…)` does, which insists on one more package. Its
    # annotations are partial: through Any it is called as it is documented.
    quiet: Any = logging.disable_progress_bar
    quiet()
    read: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    auto: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(**read(str(source), return_tensors=False)["config"])
    model: Any = auto.from_config(config, dtype=torch.bfloat16)
    tensors = read(
        str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
    )["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ModelUnsupported(f"transformers reads {source.name} only in part: no comparison")
    model.save_pretrained(target)
    read_tokenizer_files(source).backend.save(str(target / "tokenizer.json"))
