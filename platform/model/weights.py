"""Reading weights: safetensors files as a lazy source, and the plan that fills a model from it.

Checkpoints name and cut their tensors in ways of their own (experts one by one, say). transformers
knows how, in its conversion mappings; `plan_load` applies them to names alone, so that whatever
is missing, left over or misshapen is found before the first byte is read. `run_plan` then reads
one target at a time, so that the peak is the weights plus one target's sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from plait.platform.errors import ModelUnsupported

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """Tensors by name, read one at a time."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all tensors, by name."""

    @property
    def dtypes(self) -> frozenset[str]:
        """How they are stored: safetensors' names of dtypes, or GGUF's of types."""

    def read(self, name: str) -> Tensor:
        """Read one tensor, in the dtype it is stored in."""


class SafetensorsFiles:
    """The safetensors files of a checkpoint directory; headers read, tensors on demand."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, Shape] = {}
        dtypes: set[str] = set()
        for path in _safetensors_paths(directory):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelUnsupported(
                    f"{path.name} cannot be read ({error}): the file is truncated or damaged"
                ) from error
            for name in file.keys():  # noqa: SIM118 - not a mapping
                header = file.get_slice(name)
                self._shapes[name] = tuple(header.get_shape())
                dtypes.add(header.get_dtype())
                self._files[name] = file
        self._dtypes = frozenset(dtypes)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """From the files' headers."""
        return self._shapes

    @property
    def dtypes(self) -> frozenset[str]:
        """From the files' headers."""
        return self._dtypes

    def read(self, name: str) -> Tensor:
        """Read one tensor; its pages are the file's until someone copies them."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _safetensors_paths(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelUnsupported(f"{index.name} cannot be read: {error}") from error
        missing = [name for name in named if not (directory / name).exists()]
        if missing:
            raise ModelUnsupported(
                f"{len(missing)} of {len(named)} shards are missing: {_some(missing)}"
            )
        return [directory / name for name in named]
    found = sorted(directory.glob("*.safetensors"))
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    if found:
        return found
    pickles = sorted(p.name for p in directory.glob("*.bin")) + sorted(
        p.name for p in directory.glob("*.pt*")
    )
    if pickles:
        raise ModelUnsupported(
            f"the weights are Python pickles ({pickles[0]}), which can run code and are never "
            "loaded; convert them to safetensors (`model.save_pretrained(...)` does)"
        )
    raise ModelUnsupported(f"{directory.name} holds no safetensors file")


Sink = Callable[[Tensor], None]


@dataclass(slots=True)
class LoadStep:
    """One conversion: the source tensors it takes, and the targets it gives."""

    transform: Any  # transformers' WeightConverter or WeightRenaming
    first_target: str
    sources: list[str]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All steps, in the order of the model's layers, and the tied targets no file holds."""

    steps: tuple[LoadStep, ...]
    tied: Mapping[str, str]  # target → the name its weight is taken from


def plan_load(model: Any, source: TensorSource, *, convert: bool) -> LoadPlan:
    """Match the source's tensors with the model's parameters, by names and shapes alone.

    `convert`: apply transformers' conversion mapping (not for sources that already use the
    model's own names). Raises `ModelUnsupported` naming what is missing or left over.
    """
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    mapping = get_model_conversion_mapping(model) if convert else []
    steps, unexpected = _match(model, source, mapping, expected)
    found = _targets(steps, expected)
    tied = _tied(model, found, source, steps)
    _refuse_unexpected(model, unexpected)
    missing = _ignoring(model._keys_to_ignore_on_load_missing, set(expected) - found - set(tied))
    if missing:
        raise ModelUnsupported(
            f"{len(missing)} tensors of {type(model).__name__} are missing from the checkpoint: "
            f"{_some(sorted(missing, key=dot_natural_key))}"
        )
    _check_shapes(steps, source, expected)
    return LoadPlan(tuple(steps), tied)


def _match(
    model: Any, source: TensorSource, mapping: list[Any], expected: Mapping[str, Shape]
) -> tuple[list[LoadStep], set[str]]:
    """Sort the source's names into steps by their first target; return what fits nowhere, too."""
    renamings = [x for x in mapping if isinstance(x, WeightRenaming)]
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    by_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
    prefix = model.base_model_prefix
    steps: dict[str, LoadStep] = {}
    unexpected: set[str] = set()
    known = dict(expected)
    for name in sorted(source.shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            unexpected.add(name)
            continue
        if target not in steps:
            made = deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(name, target)
            steps[target] = LoadStep(made, target, [])
        step = steps[target]
        step.sources.append(name)
        step.transform.add_tensor(target, name, pattern or name, _reader(source, name))
    return list(steps.values()), unexpected


def _reader(source: TensorSource, name: str) -> Callable[[], Tensor]:
    return lambda: source.read(name)


def _targets(steps: Iterable[LoadStep], expected: Mapping[str, Shape]) -> set[str]:
    """Every target that the steps will give; a converter may give several."""
    targets: set[str] = set()
    for step in steps:
        targets.add(step.first_target)
        patterns = step.transform.target_patterns
        for pattern in patterns[1:] if isinstance(step.transform, WeightConverter) else ():
            other = step.first_target.replace(patterns[0], pattern)
            if other in expected:
                targets.add(other)
    return targets


def _tied(
    model: Any, found: set[str], source: TensorSource, steps: list[LoadStep]
) -> dict[str, str]:
    """Targets that take another's weight, either way round, and not where both are stored."""
    tied: dict[str, str] = {}
    for target, origin in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if target in found and origin in found:
            _share_equal(target, origin, source, steps, tied)
        elif origin in found:
            tied[target] = origin
        elif target in found:
            tied[origin] = target
    return tied


def _share_equal(
    target: str, origin: str, source: TensorSource, steps: list[LoadStep], tied: dict[str, str]
) -> None:
    """Both are stored though the config ties them: share them if equal, else keep both."""
    named = {step.first_target: step for step in steps}
    pair = [named.get(target), named.get(origin)]
    if any(step is None or len(step.sources) != 1 for step in pair):
        return
    first, second = (step.sources[0] for step in pair if step is not None)
    if source.shapes[first] == source.shapes[second] and torch.equal(
        source.read(first), source.read(second)
    ):
        steps.remove(named[target])
        tied[target] = origin


def _ignoring(patterns: Iterable[str] | None, names: set[str]) -> set[str]:
    return {n for n in names if not any(re.search(p, n) for p in patterns or ())}


def _refuse_unexpected(model: Any, names: set[str]) -> None:
    buffers = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.(masked_)?bias_?cache$")
    left = _ignoring((*(model._keys_to_ignore_on_load_unexpected or ()), *buffers), names)
    if left:
        raise ModelUnsupported(
            f"{len(left)} tensors of the checkpoint have no place in {type(model).__name__}: "
            f"{_some(sorted(left))}"
        )


def _check_shapes(
    steps: Iterable[LoadStep], source: TensorSource, expected: Mapping[str, Shape]
) -> None:
    for step in steps:
        if isinstance(step.transform, WeightConverter):
            continue  # checked once converted
        shape = source.shapes[step.sources[0]]
        if shape != expected[step.first_target]:
            _refuse_shape(step.sources[0], shape, expected[step.first_target])


def _refuse_shape(name: str, shape: Shape, wanted: Shape) -> None:
    raise ModelUnsupported(
        f"{name} has shape {list(shape)}, but the config asks for {list(wanted)}"
    )


def run_plan(
    plan: LoadPlan, model: Any, sinks: Mapping[str, Sink], shapes: Mapping[str, Shape],
    advance: Callable[[], None],
) -> None:  # fmt: skip
    """Read, convert and hand over every tensor, one step at a time."""
    by_origin: dict[str, list[str]] = {}
    for target, origin in plan.tied.items():
        by_origin.setdefault(origin, []).append(target)
    given: set[str] = set()
    for step in plan.steps:
        for name, tensors in _convert(step, model).items():
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            if tuple(tensor.shape) != shapes[name]:
                _refuse_shape(name, tuple(tensor.shape), shapes[name])
            sinks[name](tensor)
            for target in by_origin.get(name, ()):
                sinks[target](tensor)
            given.add(name)
        advance()
    left = _targets(plan.steps, shapes) - given
    if left:
        raise ModelUnsupported(f"the checkpoint gave no value for {_some(sorted(left))}")


def _convert(step: LoadStep, model: Any) -> dict[str, Any]:
    try:
        converted: dict[str, Any] = step.transform.convert(
            step.first_target, model=model, config=model.config
        )
    except ModelUnsupported:
        raise
    except Exception as error:
        raise ModelUnsupported(
            f"{step.first_target} cannot be made from {_some(step.sources)}: {error}"
        ) from error
    return converted


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
