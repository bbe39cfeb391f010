"""Which adapters a request asks for: by model name, or by one of the fields that clients know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.adapters.registry import is_generation
from plait.platform.errors import BadRequest

if TYPE_CHECKING:
    from plait.platform.server.schemas import AdapterChoice, AdapterRef

Pick = tuple[str | None, str | None, float]  # name or generation, scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a request asks for, not yet looked up."""

    model: str | None  # as asked
    picks: tuple[Pick, ...] = ()
    param: str = "model"  # the field that says so


def choose(body: AdapterChoice, served: str) -> Choice:
    """The adapters that `body` names; none for the base. Raises `BadRequest` where fields differ.

    Whether they are loaded is not known here.
    """
    ways = list(_ways(body, served))
    first = ways[0] if ways else Choice(model=body.model)
    for other in ways[1:]:
        if other.picks != first.picks:
            raise BadRequest(
                f"{first.param} and {other.param} ask for different adapters: give one of them",
                param=other.param,
            )
    return first


def _ways(body: AdapterChoice, served: str) -> Iterator[Choice]:
    """Each way in which the request names adapters."""

    def way(param: str, *picks: Pick) -> Choice:
        return Choice(model=body.model, picks=picks, param=param)

    name = body.model
    if name is not None and name != served:
        # A served name may have a colon itself: only what follows the whole of it is an adapter.
        yield way("model", (name.removeprefix(f"{served}:"), None, 1.0))
    if body.adapter is not None:
        yield way("adapter", _pick(body.adapter, "adapter"))
    for param in ("adapter_id", "lora_path"):
        name = getattr(body, param)
        if name is not None:
            yield way(param, (name, None, 1.0))
    if body.adapters is not None:
        several = (_pick(ref, f"adapters[{i}]") for i, ref in enumerate(body.adapters))
        yield way("adapters", *several)
    if body.lora is not None:
        yield way("lora", *((ref.id, None, ref.scale) for ref in body.lora))


def _pick(ref: str | AdapterRef, param: str) -> Pick:
    if isinstance(ref, str):
        return ref, None, 1.0
    if (ref.name is None) == (ref.generation is None):
        raise BadRequest(f"{param}: give either name or generation", param=param)
    if ref.generation is not None and not is_generation(ref.generation):
        raise BadRequest(
            f"{param}.generation is 64 lower-case hexadecimal digits", param=f"{param}.generation"
        )
    return ref.name, ref.generation, ref.scale
