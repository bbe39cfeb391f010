"""A start without transformers: what an earlier one traced and proved, from beside its weights.

The first start of a model builds the family's class, lowers it, proves the program and packs the
weights. All that comes of it is a function of the checkpoint's bytes, of a few options, of the
processor and of the code that did it; so it is written down under a key of these, and a later
start with the same key needs only this and the packed weights. What cannot be written down
(`NotStorable`) starts as the first time, always.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import sys
import time
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import plait
from plait.adapters.sites import SitePart
from plait.platform.config import KVGroup, ModelInfo, Options, VisionInfo
from plait.platform.errors import ModelUnsupported
from plait.platform.machine.cores import num_threads, pinned_cores
from plait.platform.model.executor import TorchExecutor
from plait.platform.model.loaded import LoadedModel
from plait.platform.model.locating import Located
from plait.platform.model.native.encoding import encode
from plait.platform.model.native.executor import NativeExecutor
from plait.platform.model.native.lowered import Lowered
from plait.platform.model.native.runner import Runner
from plait.platform.model.native.stored import (
    NotStorable,
    describe_program,
    describe_table,
    restore_program,
    restore_table,
)
from plait.platform.model.packed_cache import PackedCache, has_memory_for, open_cache, said
from plait.platform.model.stored_parts import (
    KeptNames,
    OpenVision,
    describe_parts,
    restore_parts,
)
from plait.platform.model.stored_tower import same_tower
from plait.platform.model.tensor_files import safetensors_paths
from plait.platform.ops._native import has_kernels
from plait.platform.starting.light_imports import import_transformers
from plait.platform.starting.notes import code, has_changed, identity, key_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plait.platform.model.build import Skeleton
    from plait.platform.model.packed_file import Kept
    from plait.platform.model.tower import TowerStep
    from plait.platform.model.vision import VisionParts

log = logging.getLogger(__name__)
# Options that change nothing of what is written down. All others are in the key, so that one that
# is added later is, too.
WITHOUT_EFFECT = frozenset(
    {"model", "revision", "chat_template", "packed_cache", "packed_cache_bytes", "max_num_seqs"}
    | {"max_num_batched_tokens", "max_num_queued_reqs", "block_size", "kv_cache_bytes"}
    | {"memory_utilization", "enable_prefix_caching", "adapter_memory_bytes", "adapter_host_bytes"}
    | {"max_adapter_rank", "encoder_cache_bytes", "adapter_drain_s", "speculation", "draft_model"}
    | {"max_draft_tokens", "draft_sampling", "num_threads", "pin_threads", "seed", "progress"}
    | {"trace_steps", "adapter_dtype", "kv_cache_dtype"}
)


def warm_start(options: Options, located: Located) -> LoadedModel | None:
    """The model as an earlier start left it; None where there was none, or not the same."""
    cache = open_cache(options)
    key = None if cache is None or options.executor == "torch" else _key(cache, located, options)
    stored = None if cache is None or key is None else cache.notes.read(key)
    if cache is None or stored is None or has_changed(stored["files"]) or not has_kernels():
        return None
    began = time.monotonic()
    info = _restore_info(stored["info"])
    kept = cache.load(stored["weights"], copy=has_memory_for(info.weight_bytes))
    if kept is None:
        return None
    info = replace(
        info,
        weights_from=said(time.monotonic() - began, kept.mapped_bytes),
        mapped_bytes=kept.mapped_bytes,
    )
    open_vision = None
    if info.vision is not None:
        open_vision = partial(_open_vision, options, located, kept.values)
    executor = _restore(stored, info, KeptNames(kept.values.items()), options, open_vision)
    return LoadedModel(
        executor=executor,
        tokenizer_source=located.path,
        info=executor.model,
        num_parameters=stored["num_parameters"],
    )


def keep_start(
    options: Options,
    located: Located,
    skeleton: Skeleton,
    executor: NativeExecutor,
    *,
    weights: str,
) -> str | None:
    """Write down what `warm_start` needs, if it gives the same; else returns why not.

    Args:
        options: Those of the start.
        located: Where its files are.
        skeleton: Of the model that was loaded.
        executor: It, proved.
        weights: The key of its weights in the cache.
    """
    cache = open_cache(options)
    key = None if cache is None else _key(cache, located, options)
    if cache is None or key is None:
        return "its files cannot be read"
    from plait.platform.model.filling import kept_values

    values = KeptNames(kept_values(skeleton))
    try:
        stored = json.loads(json.dumps(_describe(skeleton, executor, values, weights)))
        again = _restore(stored, executor.model, values, options, skeleton.parts.open_vision)
        _check_same(again, executor)
        _check_tower(stored, again, skeleton)
    except NotStorable as error:
        return str(error)
    cache.notes.write(key, stored)
    return None


def _open_vision(
    options: Options, located: Located, values: Mapping[str, Kept], step: TowerStep
) -> VisionParts:
    """Tower and projector of a model that was started without them: in the family's own class."""
    import_transformers()
    from plait.platform.model.load import rebuild

    # An image may have come first, in the midst of a step.
    with torch.inference_mode(mode=False), torch.enable_grad():
        skeleton = rebuild(options, located, values)
    assert skeleton.vision is not None
    for place in skeleton.places.by_name.values():  # numbered as those that were stored
        if place.site.part is not SitePart.LANGUAGE:
            place.module.adapters, place.module.number = step, place.leaf
    return skeleton.vision


# --- what a start depends on ---


def key_of_start(options: Options, located: Located) -> str | None:
    """Names the model as these options start it; None where nothing is kept, or it is not known."""
    cache = open_cache(options)
    return None if cache is None else _key(cache, located, options)


def _key(cache: PackedCache, located: Located, options: Options) -> str | None:
    """Names all that a stored start depends on; None where it cannot be read."""
    try:
        digests = [[path.name, cache.notes.digest(path)] for path in files_of(located.path)]
    except (OSError, ModelUnsupported):  # a first start says what is wrong
        return None
    return key_of(
        located.kind,
        located.name,
        digests,
        [[f.name, getattr(options, f.name)] for f in fields(Options) if _matters(f.name)],
        _machine(),
        _code(),
    )


def _matters(option: str) -> bool:
    return option not in WITHOUT_EFFECT


def files_of(path: Path) -> list[Path]:
    """What a model is made from. Tokenizers are read at every start."""
    if path.is_file():
        return [path]
    configs = [path / "config.json", path / "generation_config.json"]
    index = path.glob("*.safetensors.index.json")
    return [*(c for c in configs if c.exists()), *sorted(index), *safetensors_paths(path)]


def _machine() -> list[Any]:
    return [platform.machine(), sorted(torch.cpu.get_capabilities().items())]


@cache
def _code() -> list[Any]:
    """Of Plait as it lies here, file by file, and which libraries made what is stored."""
    ours = Path(__file__).parents[1]
    return code(ours, ("torch", "transformers"), Path(str(plait.__file__)).with_name("_C.so"))


# --- to data and back ---


def _describe(
    skeleton: Skeleton, executor: NativeExecutor, values: KeptNames, weights: str
) -> dict[str, Any]:
    lowered = executor.lowered
    if lowered.prologue is not None:
        raise NotStorable("something is added to the embedded rows by their positions")
    modules = list(skeleton.model.modules())
    made_by = {sys.modules[type(m).__module__].__file__ for m in modules}
    return {
        "weights": weights,
        "files": [[file, *identity(Path(file))] for file in sorted(f for f in made_by if f)],
        "info": dataclasses.asdict(executor.model),
        "num_parameters": skeleton.num_parameters(),
        "kv_groups": [dataclasses.asdict(group) for group in executor.kv_groups],
        "kv_dtype": executor.kv_dtype,
        "parts": describe_parts(skeleton.parts, values, skeleton.vision),
        "tables": [describe_table(table, modules) for table in lowered.tables],
        "program": describe_program(lowered.program, lowered.tables, values),
    }


def _restore(
    stored: Any,
    info: ModelInfo,
    values: KeptNames,
    options: Options,
    open_vision: OpenVision | None,
) -> NativeExecutor:
    tables = tuple(restore_table(table) for table in stored["tables"])
    program = restore_program(stored["program"], tables, values)
    parts = restore_parts(stored["parts"], values, open_vision)
    groups = tuple(KVGroup(**{**g, "layers": tuple(g["layers"])}) for g in stored["kv_groups"])
    runner = Runner(
        program,
        dtype=parts.dtype,
        num_threads=num_threads(options),
        pin=pinned_cores(options),
    )
    lowered = Lowered(program=program, prologue=None, tables=tables, called={})
    return NativeExecutor(TorchExecutor(parts, info, groups, stored["kv_dtype"]), lowered, runner)


def _restore_info(stored: dict[str, Any]) -> ModelInfo:
    vision = stored["vision"]
    return ModelInfo(
        **{
            **stored,
            "eos_token_ids": tuple(stored["eos_token_ids"]),
            "weight_formats": tuple((name, size) for name, size in stored["weight_formats"]),
            "notes": tuple(stored["notes"]),
            "vision": None if vision is None else VisionInfo(**vision),
        }
    )


def _check_same(again: NativeExecutor, executor: NativeExecutor) -> None:
    """What a later start will run must be what was proved, instruction by instruction.

    Raises `NotStorable`.
    """
    one, other = encode(again.lowered.program), encode(executor.lowered.program)
    # How tables go on is compared where they are described.
    tables = {t.data_ptr() for x in again.lowered.tables for t in (x.cos, x.sin)}
    if not (
        torch.equal(one.code, other.code)
        and one.names == other.names
        and one.phases == other.phases
        and len(one.tensors) == len(other.tensors)
        and all(
            a.data_ptr() in tables or torch.equal(a, b)
            for a, b in zip(one.tensors, other.tensors, strict=True)
        )
        and again.sites == executor.sites
        and again.kv_groups == executor.kv_groups
        and again.lowered.program.widths == executor.lowered.program.widths
    ):
        raise NotStorable("what was written down gives another program")


def _check_tower(stored: Any, again: NativeExecutor, skeleton: Skeleton) -> None:
    """Drop a tower that does not give the same; later starts open the family's class then."""
    tower = stored["parts"]["tower"]
    if tower is None or skeleton.vision is None:
        return
    if not same_tower(again.open_vision().root, skeleton.vision.root, tower):
        log.warning("a recorded tower differs from its class, which later starts will open")
        stored["parts"]["tower"] = None
