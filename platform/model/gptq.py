"""GPTQ checkpoints, as AutoGPTQ and GPTQModel pack them.

A layer has qweight [K / per word, N], qzeros [groups, N / per word], scales [groups, N] and g_idx
[K], the group of each input; words are int32, the lowest bits first. Version 1 of the format, the
usual one, stores zero points less one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.platform.model.stored_weight import (
    Config,
    StoredWeight,
    affine,
    check_groups,
    refuse,
    shape_of,
    unpack_words,
)
from plait.platform.model.tensor_files import SafetensorsFiles
from plait.platform.model.weight_format import WeightFormat
from plait.platform.ops.quantized_weight import Quantized, Scales


def check_gptq(config: Config) -> None:
    """Refuse settings that are not read."""
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        refuse(f"GPTQ in the format '{form}'")
    if config.get("bits") not in (4, 8):
        refuse(f"GPTQ of {config.get('bits')} bits (4 and 8 are)")


def find_gptq(files: SafetensorsFiles, config: Config) -> dict[str, StoredWeight]:
    """All weights that GPTQ quantised, by the name of a plain checkpoint."""
    found: dict[str, StoredWeight] = {}
    for name in files.shapes:
        stem, _, ending = name.rpartition(".")
        if ending == "qweight":
            found[f"{stem}.weight"] = _gptq_weight(files, config, stem)
    return found


def _gptq_weight(files: SafetensorsFiles, config: Config, stem: str) -> StoredWeight:
    names = {part: f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    names = {part: name for part, name in names.items() if name in files.shapes}
    num_words, num_outputs = shape_of(files, names["qweight"])
    num_inputs = shape_of(files, names["g_idx"])[0] if "g_idx" in names else 0
    bits = num_words * 32 // num_inputs if num_inputs else int(config["bits"])
    num_inputs = num_inputs or num_words * 32 // bits
    if bits not in (4, 8):
        refuse(f"GPTQ of {bits} bits at {stem}")
    num_groups = shape_of(files, f"{stem}.scales")[0]
    shape_of(files, f"{stem}.qzeros")
    group = num_inputs if num_groups == 1 else int(config["group_size"])
    check_groups(stem, num_inputs, group, num_groups)
    offset = 1 if config.get("checkpoint_format", "gptq") == "gptq" else 0

    def read() -> Quantized:
        codes = unpack_words(files.read(names["qweight"]), bits, 0).T
        zeros = (unpack_words(files.read(names["qzeros"]), bits, 1).int() + offset) & (2**bits - 1)
        scales = files.read(names["scales"]).T.float()
        zeros = zeros[:, :num_outputs].T
        if is_ordered:
            return affine(codes, bits, group, scales, zeros)
        return _expanded(codes, bits, files.read(names["g_idx"]).long(), scales, zeros)

    is_ordered = "g_idx" not in names or _is_ordered(files.read(names["g_idx"]), group)
    is_symmetric = bool(config.get("sym", True))
    return StoredWeight(
        shape=(num_outputs, num_inputs),
        format=WeightFormat(
            name=f"GPTQ int{bits}",
            bits=bits,
            group=0 if group >= num_inputs else group,
            has_minimums=not is_symmetric,
            scales=Scales.FLOAT16 if is_symmetric else Scales.FLOAT32,
        ),
        parts=tuple(names.values()),
        read=read,
        why_not="" if is_ordered else (
            "its inputs are grouped in an order of their own (desc_act, act-order), which is not "
            "served as it is; use a version without, or --quantization int8, int4 or none, which "
            "expand its weights first"
        ),
    )  # fmt: skip


def _is_ordered(group_of: Tensor, group: int) -> bool:
    return torch.equal(group_of.long(), torch.arange(len(group_of)) // group)


def _expanded(
    codes: Tensor, bits: int, group_of: Tensor, scales: Tensor, zeros: Tensor
) -> Quantized:
    """A weight with a scale for every input, only to be expanded."""
    return affine(codes, bits, 1, scales[:, group_of], zeros[:, group_of])
