"""Loading a model in its family's own class, or only checking whether it could be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from plait.platform.config import KVGroup, ModelInfo, Options
from plait.platform.errors import ConfigError, PlaitError
from plait.platform.kv.pages import DTYPES
from plait.platform.machine.cores import num_threads, pinned_cores
from plait.platform.model.build import Skeleton, build_skeleton, kv_groups, prepare
from plait.platform.model.executor import TorchExecutor
from plait.platform.model.filling import put_values
from plait.platform.model.gguf_header import read_header
from plait.platform.model.kept_weights import fill
from plait.platform.model.loaded import LoadedModel, SupportReport
from plait.platform.model.locating import Located
from plait.platform.model.native.describe import describe
from plait.platform.model.native.executor import NativeExecutor
from plait.platform.model.native.lowering import lower
from plait.platform.model.native.making import make_native
from plait.platform.model.native.runner import Runner
from plait.platform.model.native.trace import NotLowered
from plait.platform.model.packed_file import Kept
from plait.platform.model.rope import RopeFacts, rope_facts
from plait.platform.model.source import Checkpoint, find_checkpoint
from plait.platform.model.tensor_files import SafetensorsFiles
from plait.platform.model.vision import vision_info
from plait.platform.model.warm_start import keep_start
from plait.platform.model.wishes import check_options
from plait.platform.starting.light_imports import without_compiler

log = logging.getLogger(__name__)


@without_compiler()
def load_fresh(options: Options, located: Located) -> LoadedModel:
    """Load the model in the family's own class, lower it, and keep what the next start needs.

    Raises `ConfigError` where a flag cannot hold, `ModelUnsupported` where the model cannot be
    served or its checkpoint is not whole.
    """
    checkpoint = find_checkpoint(options, located)
    dtype = _resolve_dtype(options, _stored_dtypes(checkpoint))
    skeleton = build_skeleton(checkpoint, DTYPES[dtype], options)
    rope, max_model_len = _context(checkpoint, options)
    prepare(skeleton, max_model_len=max_model_len)
    with _progress(options, len(skeleton.plan.steps)) as advance:
        origin = fill(skeleton, checkpoint, options, advance)
    info = replace(
        _info(checkpoint, options, skeleton, dtype, rope),
        weights_from=origin.text,
        mapped_bytes=origin.mapped_bytes,
    )
    groups = kv_groups(skeleton, max_model_len)
    executor = _executor(options, skeleton, TorchExecutor(skeleton.parts, info, groups, dtype))
    if isinstance(executor, NativeExecutor) and origin.key is not None:
        why_not = keep_start(options, located, skeleton, executor, weights=origin.key)
        if why_not is not None:
            log.info("later starts of %s take as long as this one: %s", info.name, why_not)
    return LoadedModel(
        executor=executor,
        tokenizer_source=located.path,
        info=executor.model,
        num_parameters=skeleton.num_parameters(),
    )


@without_compiler()
def rebuild(options: Options, located: Located, values: Mapping[str, Kept]) -> Skeleton:
    """The model that `load_fresh` loads, with values that it kept."""
    checkpoint = find_checkpoint(options, located)
    dtype = _resolve_dtype(options, _stored_dtypes(checkpoint))
    skeleton = build_skeleton(checkpoint, DTYPES[dtype], options)
    prepare(skeleton, max_model_len=_context(checkpoint, options)[1])
    put_values(skeleton, values)
    return skeleton


def _executor(
    options: Options, skeleton: Skeleton, torch_executor: TorchExecutor
) -> TorchExecutor | NativeExecutor:
    """The native executor where the model can be lowered, else torch's with a note of why."""
    if options.executor == "torch":
        return torch_executor
    make_runner = partial(
        Runner,
        dtype=skeleton.model.config.dtype,
        num_threads=num_threads(options),
        pin=pinned_cores(options),
    )
    try:
        return make_native(skeleton, torch_executor, make_runner)
    except NotLowered as error:
        if options.executor == "native":
            raise _cannot_lower(torch_executor.model.name, error) from error
        torch_executor.release()
        notes = (*torch_executor.model.notes, _not_lowered(error))
        torch_executor.model = replace(torch_executor.model, notes=notes)
        return torch_executor


def _not_lowered(error: NotLowered) -> str:
    return f"the torch executor computes this model, several times slower: {error}"


def _cannot_lower(name: str, error: NotLowered) -> ConfigError:
    return ConfigError(
        f"--executor native: {name} cannot be lowered to a layer program: {error}. "
        "Use auto or torch",
        param="executor",
    )


def _program(
    options: Options, skeleton: Skeleton, groups: tuple[KVGroup, ...], max_model_len: int
) -> tuple[tuple[str, ...], str | None]:
    """What the native executor would run, or why it cannot."""
    if options.executor == "torch":
        return (), None
    prepare(skeleton, max_model_len=max_model_len)
    try:
        return describe(lower(skeleton, groups, num_positions=max_model_len)), None
    except NotLowered as error:
        if options.executor == "native":
            raise _cannot_lower(options.model or "the embedded model", error) from error
        return (), _not_lowered(error)


@without_compiler()
def check(options: Options) -> SupportReport:
    """Say whether `options.model` can be served, from its config and headers alone."""
    name = options.model or "the embedded model"
    architecture: str | None = None
    try:
        check_options(options)
        checkpoint = find_checkpoint(options)
        name, architecture = checkpoint.name, checkpoint.model_class.__name__
        dtype = _resolve_dtype(options, _stored_dtypes(checkpoint))
        skeleton = build_skeleton(checkpoint, DTYPES[dtype], options)
        rope, max_model_len = _context(checkpoint, options)
        groups = kv_groups(skeleton, max_model_len)
        program, why_torch = _program(options, skeleton, groups, max_model_len)
    except PlaitError as error:
        return SupportReport(
            servable=False, reason=error.message, model=name, architecture=architecture
        )
    info = _info(checkpoint, options, skeleton, dtype, rope)
    return SupportReport(
        servable=True,
        reason=None,
        model=name,
        architecture=architecture,
        executor="native" if program else "torch",
        dtype=dtype,
        num_parameters=skeleton.num_parameters(),
        weight_bytes=info.weight_bytes,
        weight_formats=info.weight_formats,
        kv_bytes_per_token=sum(g.bytes_per_block(1, DTYPES[dtype].itemsize) for g in groups),
        kv_groups=groups,
        context_length=info.context_length,
        num_adapter_sites=len(skeleton.places.by_name),
        vision=info.vision,
        program=program,
        notes=info.notes if why_torch is None else (*info.notes, why_torch),
    )


def _context(checkpoint: Checkpoint, options: Options) -> tuple[RopeFacts, int]:
    """The model's rope, and the longest request that will be served."""
    rope = rope_facts(checkpoint.text_config, options.max_model_len)
    wanted = options.max_model_len or rope.context_length
    if wanted > rope.context_length:
        raise ConfigError(
            f"--max-model-len {wanted} is beyond the {rope.context_length} tokens of "
            f"{checkpoint.name}; use at most {rope.context_length}",
            param="max_model_len",
        )
    return rope, wanted


def _stored_dtypes(checkpoint: Checkpoint) -> frozenset[str]:
    """How the weights are stored: names of safetensors' dtypes or GGUF's types."""
    if checkpoint.is_gguf:
        return frozenset(tensor.kind.name for tensor in read_header(checkpoint.path).tensors)
    return SafetensorsFiles(checkpoint.path).dtypes


def _resolve_dtype(options: Options, stored: frozenset[str]) -> str:
    """bfloat16 where the checkpoint is at most half precision and the CPU widens it quickly.

    Without bf16 arithmetic the kernels widen it in registers: as fast as fp32 for many rows, 2.5
    times as fast for one (SmolLM2, AVX2), where the bytes of the weights decide.
    """
    if options.dtype != "auto":
        return options.dtype
    floats = {name for name in stored if not name.startswith(("I", "U", "BOOL"))}
    if "F32" in floats and not floats - {"F32", "F64"}:
        return "float32"
    return "bfloat16" if torch.cpu.get_capabilities().get("avx2") else "float32"


def _info(
    checkpoint: Checkpoint, options: Options, skeleton: Skeleton, dtype: str, rope: RopeFacts
) -> ModelInfo:
    notes = [*checkpoint.notes, *rope.notes]
    if "F16" in skeleton.source.dtypes and not checkpoint.is_gguf:
        notes.append(f"float16 weights are computed in {dtype}")
    formats = skeleton.bytes_by_format()
    config = skeleton.model.config
    num_tokens = config.get_text_config().vocab_size
    return ModelInfo(
        name=options.served_model_name or checkpoint.name,
        architecture=checkpoint.model_class.__name__,
        source=checkpoint.kind,
        dtype=dtype,
        executor="torch",
        vocab_size=skeleton.vocab_size,
        context_length=rope.context_length,
        eos_token_ids=tuple(t for t in checkpoint.eos_token_ids if t < num_tokens),
        weight_bytes=sum(formats.values()),
        weight_formats=tuple(sorted(formats.items(), key=lambda item: -item[1])),
        notes=tuple(notes),
        vision=None if skeleton.vision is None else vision_info(skeleton.vision, skeleton.model),
    )


@contextmanager
def _progress(options: Options, num_steps: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not options.progress or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("Loading weights"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("weights", total=num_steps)
        yield lambda: progress.advance(task)
