"""AWQ checkpoints, as AutoAWQ packs them for its GEMM kernels.

A layer has qweight [K, N / 8], qzeros [groups, N / 8] and scales [groups, N]. A word holds eight
outputs in an order of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    unpack_words,
)
from plait.platform.model.tensor_files import SafetensorsFiles
from plait.platform.model.weight_format import WeightFormat
from plait.platform.ops.quantized_weight import Quantized, Scales

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each half byte of a word is


def check_awq(config: Config) -> None:
    """Refuse settings that are not read."""
    keys = ("version", "format", "checkpoint_format")  # its writers have had several
    versions = {str(config[key]).lower() for key in keys if config.get(key)} or {"gemm"}
    if versions != {"gemm"} or config.get("backend", "autoawq") == "llm-awq":
        version = " and ".join(sorted(versions))
        refuse(f"AWQ in the layout '{version}' of {config.get('backend', 'autoawq')}")
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        refuse(f"AWQ of {bits!r} bits (4 are)")
    check_sizes(config, "group_size", "q_group_size")


def find_awq(files: SafetensorsFiles, config: Config) -> dict[str, StoredWeight]:
    """All weights that AWQ quantised, by the name of a plain checkpoint."""
    group_size = int(config.get("group_size", config.get("q_group_size", 128)))
    found: dict[str, StoredWeight] = {}
    for name in files.shapes:
        stem, _, ending = name.rpartition(".")
        if ending == "qweight":
            found[f"{stem}.weight"] = _awq_weight(files, stem, group_size)
    return found


def _awq_weight(files: SafetensorsFiles, stem: str, group_size: int) -> StoredWeight:
    names = [f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")]
    num_inputs, num_words = matrix_of(files, names[0], WORDS)
    group = num_inputs if group_size == -1 else group_size
    num_groups, _ = matrix_of(files, names[2], SCALES)
    check_groups(stem, num_inputs, group, num_groups)
    part_of(files, names[1], WORDS, (num_groups, num_words))
    part_of(files, names[2], SCALES, (num_groups, num_words * 8))
    back = torch.tensor(_AWQ_COLUMNS).argsort()

    def outputs(words: Tensor) -> Tensor:
        found: Tensor = unpack_words(words, 4, 1).unflatten(1, (-1, 8))[:, :, back].flatten(1).T
        return found

    def read() -> Quantized:
        qweight, qzeros, scales = map(files.read, names)
        return affine(outputs(qweight), 4, group, scales.T, outputs(qzeros))

    return StoredWeight(
        shape=(num_words * 8, num_inputs),
        format=WeightFormat(
            name="AWQ int4",
            bits=4,
            group=0 if group >= num_inputs else group,
            has_minimums=True,
            scales=Scales.FLOAT32,
        ),
        parts=tuple(names),
        read=read,
    )
