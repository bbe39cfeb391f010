"""Torch functions that were written down, run again over other tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One answer of one call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None  # among the answers, where there are several

    @property
    def name(self) -> str:
        """For people, and to tell sums and products."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))


def tensors_of(*values: Any) -> list[Tensor]:
    """All tensors in nested arguments."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_of(*value)
        elif isinstance(value, dict):
            found += tensors_of(*value.values())
    return found


class Replay:
    """A tensor as a function of some of those that it was computed from."""

    def __init__(
        self, result: Tensor, recorded: Mapping[int, Recorded], inputs: Mapping[int, str]
    ) -> None:
        """`inputs` names, by id, the tensors that a call gives anew."""
        self._result = result
        self._inputs = dict(inputs)
        self._recorded: dict[int, Recorded] = {}
        self._keep(result, recorded)

    def _keep(self, tensor: Tensor, recorded: Mapping[int, Recorded]) -> None:
        if id(tensor) in self._inputs or id(tensor) in self._recorded:
            return
        node = recorded.get(id(tensor))
        if node is not None:
            self._recorded[id(tensor)] = node
            for part in tensors_of(node.args, node.kwargs):
                self._keep(part, recorded)

    @torch.no_grad()
    def __call__(self, *, cast_to: torch.dtype | None = None, **given: Tensor) -> Tensor:
        """Compute it again.

        `cast_to`: what stands where something that follows from the input "x" is cast.
        """
        known = {key: given[name] for key, name in self._inputs.items()}
        result: Tensor = self._run(self._result, known, {}, cast_to)
        return result

    def _run(self, value: Any, known: dict[int, Tensor], answers: dict[Any, Any], cast: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in known and id(value) not in self._recorded:
                return value
            if id(value) not in known:
                node = self._recorded[id(value)]
                call = (id(node.function), id(node.args), id(node.kwargs))
                if call not in answers:
                    to = cast if self._takes_x(value) else None
                    args = self._run(node.args, known, answers, to)
                    kwargs = self._run(node.kwargs, known, answers, to)
                    answers[call] = node.function(*args, **kwargs)
                answer = answers[call]
                known[id(value)] = answer if node.index is None else answer[node.index]
            return known[id(value)]
        if isinstance(value, tuple | list):
            return type(value)(self._run(part, known, answers, cast) for part in value)
        if isinstance(value, dict):
            return {name: self._run(part, known, answers, cast) for name, part in value.items()}
        if cast is not None and isinstance(value, torch.dtype) and value.is_floating_point:
            return cast
        return value

    def form(self) -> tuple[Any, ...]:
        """What it computes from what: equal for equal functions of the same tensors."""
        return ("replay", self._form(self._result, {}))

    def _form(self, value: Any, known: dict[int, Any]) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in known:
                known[id(value)] = self._tensor_form(value, known)
            return known[id(value)]
        if isinstance(value, tuple | list):
            return tuple(self._form(part, known) for part in value)
        if isinstance(value, dict):
            return tuple((name, self._form(part, known)) for name, part in value.items())
        return repr(value)

    def _tensor_form(self, tensor: Tensor, known: dict[int, Any]) -> Any:
        if id(tensor) in self._inputs:
            return self._inputs[id(tensor)]
        node = self._recorded.get(id(tensor))
        if node is None:
            return id(tensor)
        args, kwargs = self._form(node.args, known), self._form(node.kwargs, known)
        return (node.function, node.index, args, kwargs)

    def _takes_x(self, tensor: Tensor) -> bool:
        if self._inputs.get(id(tensor)) == "x":
            return True
        node = self._recorded.get(id(tensor))
        parts = () if node is None else tensors_of(node.args, node.kwargs)
        return any(self._takes_x(part) for part in parts)
