"""GPTQ checkpoints, as AutoGPTQ and GPTQModel pack them.

A layer has qweight [K / per word, N], qzeros [groups, N / per word], scales [groups, N] and g_idx
[K], the group of each input; words are int32, the lowest bits first. Version 1 of the format, the
usual one, stores zero points less one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.platform.errors import ModelUnsupported
from plait.platform.model.stored_weight import (
    SCALES,
    WORDS,
    Config,
    StoredWeight,
    affine,
    check_groups,
    check_sizes,
    matrix_of,
    part_of,
    refuse,
    shape_of,
    unpack_words,
)
from plait.platform.model.tensor_files import SafetensorsFiles
from plait.platform.model.weight_format import WeightFormat
from plait.platform.ops.quantized_weight import Quantized, Scales


def check_gptq(config: Config) -> None:
    """Refuse settings that are not read."""
    forms = _forms(config)
    if not forms <= {"gptq", "gptq_v2"} or len(forms) > 1:
        refuse(f"GPTQ in the format '{' and '.join(sorted(forms))}'")
    if config.get("bits") not in (4, 8):
        refuse(f"GPTQ of {config.get('bits')!r} bits (4 and 8 are)")
    words = str(config.get("pack_dtype") or "int32").removeprefix("torch.")
    if words != "int32":
        refuse(f"GPTQ packed into {words} (int32 is)")
    meta = config.get("meta")
    if config.get("rotation") or (isinstance(meta, dict) and meta.get("rotation")):
        refuse("GPTQ of rotated weights")
    check_sizes(config, "group_size")


def _forms(config: Config) -> set[str]:
    """All that the config says the layout is; its writers have had three keys for that."""
    found = {str(config[key]) for key in ("checkpoint_format", "format") if config.get(key)}
    return found | {"marlin"} if config.get("is_marlin_format") else found or {"gptq"}


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
    num_words, num_outputs = matrix_of(files, f"{stem}.qweight", WORDS)
    bits = int(config["bits"])
    if "g_idx" in names:
        num_inputs = math.prod(shape_of(files, names["g_idx"]))
        part_of(files, names["g_idx"], ("I32", "I64"), (num_inputs,))
        if config.get("dynamic") and num_inputs:  # sizes of their own for some layers
            bits = num_words * 32 // num_inputs
        if bits not in (4, 8) or num_words * 32 != num_inputs * bits:
            raise ModelUnsupported(
                f"{stem} has {num_words} words for {num_inputs} inputs, which are not of {bits} "
                "bits as its quantization_config has it (4 and 8 are served)"
            )
    else:
        num_inputs = num_words * 32 // bits
        if config.get("desc_act"):
            raise ModelUnsupported(
                f"{stem}.g_idx is missing, which says in what order the inputs are (desc_act)"
            )
    group = int(config.get("group_size", 128))
    group = num_inputs if group == -1 else group
    num_groups, _ = matrix_of(files, f"{stem}.scales", SCALES)
    check_groups(stem, num_inputs, group, num_groups)
    part_of(files, f"{stem}.scales", SCALES, (num_groups, num_outputs))
    part_of(files, f"{stem}.qzeros", WORDS, (num_groups, -(-num_outputs * bits // 32)))
    offset = 1 if _forms(config) == {"gptq"} else 0
    if "g_idx" in names:
        _check_order(stem, files.read(names["g_idx"]), num_groups)

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


def _check_order(stem: str, group_of: Tensor, num_groups: int) -> None:
    if len(group_of) and not 0 <= int(group_of.min()) <= int(group_of.max()) < num_groups:
        raise ModelUnsupported(f"{stem}.g_idx names groups beyond the {num_groups} that there are")


def _is_ordered(group_of: Tensor, group: int) -> bool:
    return torch.equal(group_of.long(), torch.arange(len(group_of)) // group)


def _expanded(
    codes: Tensor, bits: int, group_of: Tensor, scales: Tensor, zeros: Tensor
) -> Quantized:
    """A weight with a scale for every input, only to be expanded."""
    return affine(codes, bits, 1, scales[:, group_of], zeros[:, group_of])
