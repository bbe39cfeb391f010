"""Safetensors checkpoints whose weights are quantised: GPTQ, AWQ and compressed-tensors.

Their layers store codes, scales and zero points as tensors of their own. Here each layer is one
weight again, under the name it would have in a plain checkpoint, so that everything behind it (the
renaming of tensors, the joining of experts) stays as it is. Whatever differs in how a weight is to
be read is refused by name; layouts are those of the projects' own packing code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from plait.platform.errors import ModelUnsupported
from plait.platform.model.awq import check_awq, find_awq
from plait.platform.model.compressed_tensors import check_compressed, find_compressed
from plait.platform.model.gptq import check_gptq, find_gptq
from plait.platform.model.stored_weight import Config, StoredWeight
from plait.platform.model.tensor_files import SafetensorsFiles, Shape, some
from plait.platform.model.weight_format import WeightFormat, check_finite
from plait.platform.ops.quantized_weight import Quantized


class QuantizedFiles:
    """A quantised checkpoint's tensors, under the names of a plain one."""

    def __init__(self, files: SafetensorsFiles, stored: Mapping[str, StoredWeight]) -> None:
        self._files = files
        self._stored = stored
        parts = {part for weight in stored.values() for part in weight.parts}
        twice = sorted((stored.keys() & files.shapes.keys()) - parts)
        if twice:
            raise ModelUnsupported(
                f"the checkpoint has {some(twice)} both quantised and as plain tensors; which is "
                "meant nobody can tell: remove one of them"
            )
        self._shapes = {name: s for name, s in files.shapes.items() if name not in parts}
        self._shapes |= {name: weight.shape for name, weight in stored.items()}
        usable = {name: weight for name, weight in stored.items() if not weight.why_not}
        self._formats = {name: weight.format for name, weight in usable.items()}
        self.why_not = next((f"{n}: {w.why_not}" for n, w in stored.items() if w.why_not), "")

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of the weights, and of what is stored as plain tensors."""
        return self._shapes

    @property
    def dtypes(self) -> frozenset[str]:
        """Of everything in the files."""
        return self._files.dtypes

    @property
    def integers(self) -> frozenset[str]:
        """Plain tensors of whole numbers."""
        return self._files.integers - self._stored.keys()

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """Of what `read_quantized` gives."""
        return self._formats

    def read(self, name: str) -> Tensor:
        """One tensor, expanded to fp32 where it is quantised."""
        is_stored = name in self._stored
        return self.read_quantized(name).unpack() if is_stored else self._files.read(name)

    def read_quantized(self, name: str) -> Quantized:
        """One weight as its codes."""
        weight = self._stored[name].read()
        check_finite(name, weight.scales, weight.mins)
        return weight


def open_quantized(files: SafetensorsFiles, config: Config) -> QuantizedFiles:
    """Find the quantised weights in the files of a checkpoint with this `quantization_config`.

    Raises `ModelUnsupported` where its method or one of its settings is not served.
    """
    check_method(config)
    return QuantizedFiles(files, _FINDERS[config["quant_method"]](files, config))


def check_method(config: Config) -> None:
    """Refuse methods and settings that we do not read, from the config alone."""
    method = config.get("quant_method", "an unnamed method")
    if method not in _CHECKS:
        raise ModelUnsupported(
            f"the checkpoint is quantised with {method}, which is not served (served: "
            f"{', '.join(_CHECKS)}, and GGUF files); use its unquantised checkpoint, with "
            "--quantization int8 or int4 if memory is short, or a GGUF file"
        )
    _CHECKS[method](config)


_CHECKS: Mapping[str, Callable[[Config], None]] = {
    "gptq": check_gptq,
    "awq": check_awq,
    "compressed-tensors": check_compressed,
}
_FINDERS: Mapping[str, Callable[[SafetensorsFiles, Config], dict[str, StoredWeight]]] = {
    "gptq": find_gptq,
    "awq": find_awq,
    "compressed-tensors": find_compressed,
}
