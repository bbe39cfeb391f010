"""What loading a model gives, and what checking one says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.platform.config import KVGroup, ModelInfo, VisionInfo

if TYPE_CHECKING:
    from plait.platform.model.executor import TorchExecutor
    from plait.platform.model.native.executor import NativeExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to compute, but for its KV pages."""

    executor: TorchExecutor | NativeExecutor
    tokenizer_source: Path  # what `Tokenizer.load` takes: a directory or a GGUF file
    info: ModelInfo
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportReport:
    """Whether a model can be served, and what that takes; or exactly why not."""

    servable: bool
    reason: str | None  # why not
    model: str
    architecture: str | None = None
    executor: str | None = None
    dtype: str | None = None
    num_parameters: int = 0
    weight_bytes: int = 0
    weight_formats: tuple[tuple[str, int], ...] = ()  # (name, bytes), most bytes first
    kv_bytes_per_token: int = 0  # where every layer keeps the token
    kv_groups: tuple[KVGroup, ...] = ()
    context_length: int = 0
    num_adapter_sites: int = 0  # places that an adapter can change
    vision: VisionInfo | None = None  # None: it takes no images
    program: tuple[str, ...] = ()  # what the native executor would run
    notes: tuple[str, ...] = ()
