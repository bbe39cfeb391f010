"""What users may ask of any model."""

from __future__ import annotations

from plait.platform.config import Options
from plait.platform.errors import ConfigError
from plait.platform.kv.pages import DTYPES
from plait.platform.machine.cores import pinned_cores

QUANTIZATIONS = ("auto", "none", "int8", "int4")
ACTIVATIONS = ("auto", "exact", "int8")


def check_options(options: Options) -> None:
    """Raises `ConfigError` where a wish about the model cannot hold, whatever the model is."""
    _check_quantization(options)
    if options.dtype not in ("auto", *DTYPES):
        raise ConfigError(
            f"dtype {options.dtype} is not served; use auto, float32 or bfloat16", param="dtype"
        )
    if options.executor not in ("auto", "native", "torch"):
        raise ConfigError(
            f"there is no executor {options.executor}; use auto, native or torch", param="executor"
        )
    pinned_cores(options)
    if options.num_threads is not None and options.num_threads < 1:
        raise ConfigError("--threads must be at least 1", param="num_threads")
    if options.adapter_dtype not in ("auto", "int8"):
        raise ConfigError(
            f"adapters are not kept as {options.adapter_dtype}; use auto (the model's) or int8",
            param="adapter_dtype",
        )
    if options.device not in ("auto", "cpu"):
        raise ConfigError(f"device {options.device} is not served; use cpu", param="device")


def _check_quantization(options: Options) -> None:
    for name, known in (("quantization", QUANTIZATIONS), ("quantized_activations", ACTIVATIONS)):
        value = getattr(options, name)
        if value not in known:
            raise ConfigError(
                f"{name} {value} is not known; use one of {', '.join(known)}", param=name
            )
