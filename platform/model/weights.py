"""The plan that fills a model from a source of tensors, and its way through it.

Checkpoints name and cut their tensors in ways of their own (experts one by one, say). transformers
knows how, in its conversion mappings; `plan_load` applies them to names alone, so that whatever
is missing, left over or misshapen is found before the first byte is read. `run_plan` then reads
one target while it hands over another, so that the peak is the weights plus the sources of two.

A source may hold weights as small codes with scales. They stay so where the conversion moves whole
rows, as all that stack and join experts do: it is then run on codes, scales and minimums alike.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Split,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from plait.platform.errors import ModelUnsupported
from plait.platform.model.tensor_files import Shape, TensorSource, some
from plait.platform.model.weight_format import WeightFormat
from plait.platform.ops.quantized_weight import Quantized

_MOVES_ROWS = (Chunk, Concatenate, Interleave, MergeModulelist, Split)  # … or fails on the shapes


_Result = TypeVar("_Result")
Sink = Callable[[Tensor | Quantized], None]


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
    formats: Mapping[str, WeightFormat]  # of the targets that can be had as they are stored


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
            f"{some(sorted(missing, key=dot_natural_key))}"
        )
    _check_shapes(steps, source, expected)
    _refuse_integers(steps, source, model)
    return LoadPlan(tuple(steps), tied, _formats(steps, source, expected))


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
        step.transform.add_tensor(target, name, pattern or name, _Reader(source, name))
    return list(steps.values()), unexpected


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one tensor when the conversion calls for it."""

    source: TensorSource
    name: str

    def __call__(self) -> Tensor:
        return self.source.read(self.name)

    def __deepcopy__(self, _: object) -> _Reader:
        return self


def _formats(
    steps: Iterable[LoadStep], source: TensorSource, expected: Mapping[str, Shape]
) -> dict[str, WeightFormat]:
    """Targets whose sources share one format, and are only moved about by rows."""
    formats: dict[str, WeightFormat] = {}
    for step in steps:
        found = {source.formats.get(name) for name in step.sources}
        operations = getattr(step.transform, "operations", ())
        (stored, *others) = found
        if stored is None or others or not all(type(x) in _MOVES_ROWS for x in operations):
            continue
        formats.update(dict.fromkeys(_targets([step], expected), stored))
    return formats


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
            f"{some(sorted(left))}"
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


def _refuse_integers(steps: Iterable[LoadStep], source: TensorSource, model: Any) -> None:
    """Codes whose scales are missing would else be taken for the weights."""
    floating = {name for name, t in model.state_dict().items() if t.is_floating_point()}
    wrong = [
        name
        for step in steps
        if step.first_target in floating
        for name in step.sources
        if name in source.integers
    ]
    if wrong:
        raise ModelUnsupported(
            f"{some(wrong)} hold whole numbers where weights belong: codes of a quantised "
            "checkpoint whose scales or quantization_config are missing; use one that is complete"
        )


def _refuse_shape(name: str, shape: Shape, wanted: Shape) -> None:
    raise ModelUnsupported(
        f"{name} has shape {list(shape)}, but the config asks for {list(wanted)}"
    )


def run_plan(
    plan: LoadPlan, model: Any, sinks: Mapping[str, Sink], shapes: Mapping[str, Shape],
    advance: Callable[[], None], as_stored: Container[str] = (),
) -> None:  # fmt: skip
    """Read, convert and hand over every tensor, one step at a time.

    Targets of `as_stored`, all of the plan's `formats`, come as their codes.
    """
    by_origin: dict[str, list[str]] = {}
    for target, origin in plan.tied.items():
        by_origin.setdefault(origin, []).append(target)
    given: set[str] = set()
    for targets in _one_ahead(
        [partial(_targets_of, step, model, as_stored) for step in plan.steps]
    ):
        for name, tensor in targets:
            shape = tuple(tensor.codes.shape if isinstance(tensor, Quantized) else tensor.shape)
            if shape != shapes[name]:
                _refuse_shape(name, shape, shapes[name])
            sinks[name](tensor)
            for target in by_origin.get(name, ()):
                sinks[target](tensor)
            given.add(name)
        advance()
    left = _targets(plan.steps, shapes) - given
    if left:
        raise ModelUnsupported(f"the checkpoint gave no value for {some(sorted(left))}")


def _one_ahead(jobs: Sequence[Callable[[], _Result]]) -> Iterator[_Result]:
    """Results in order; the next is made by another thread while one is used."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights") as pool:
        pending = deque(pool.submit(job) for job in jobs[:1])
        for following in jobs[1:]:
            result = pending.popleft().result()
            pending.append(pool.submit(following))
            yield result
        for last in pending:
            yield last.result()


def _targets_of(
    step: LoadStep, model: Any, as_stored: Container[str]
) -> list[tuple[str, Tensor | Quantized]]:
    with torch.no_grad():
        is_quantized = step.first_target in as_stored
        return list((_quantized if is_quantized else _plain)(step, model))


def _plain(step: LoadStep, model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensors in _convert(step, step.transform, model).items():
        yield name, tensors[0] if isinstance(tensors, list) else tensors


def _quantized(step: LoadStep, model: Any) -> Iterator[tuple[str, Quantized]]:
    """The step's targets as codes: its conversion is run on each part of the weights."""
    readers = step.transform.collected_tensors
    weights = {r.name: r.source.read_quantized(r.name) for found in readers.values() for r in found}
    parts: list[dict[str, Tensor]] = []
    for part in ("codes", "scales", "mins"):
        transform = deepcopy(step.transform)
        transform.collected_tensors = {
            key: [partial(getattr, weights[r.name], part) for r in found]
            for key, found in readers.items()
        }
        converted = _convert(step, transform, model)
        parts.append({k: t[0] if isinstance(t, list) else t for k, t in converted.items()})
    first = next(iter(weights.values()))
    codes, scales, mins = parts
    for name in codes:
        if not codes[name].shape[:-1] == scales[name].shape[:-1] == mins[name].shape[:-1]:
            raise ModelUnsupported(f"{name} cannot be made from quantised {some(step.sources)}")
        yield (
            name,
            Quantized(
                codes=codes[name],
                bits=first.bits,
                group=first.group,
                scales=scales[name],
                mins=mins[name],
            ),
        )


def _convert(step: LoadStep, transform: Any, model: Any) -> dict[str, Any]:
    try:
        converted: dict[str, Any] = transform.convert(
            step.first_target, model=model, config=model.config
        )
    except ModelUnsupported:
        raise
    except Exception as error:
        raise ModelUnsupported(
            f"{step.first_target} cannot be made from {some(step.sources)}: {error}"
        ) from error
    return converted
