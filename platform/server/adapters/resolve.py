"""From what a request asks for to adapters that it holds for its life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.adapters.composition import Chosen, compose
from plait.adapters.registry import Named
from plait.platform.bundles import tokenizer_for
from plait.platform.errors import AdapterNotFound, DeadlineExceeded, ModelNotFound
from plait.platform.server.adapters.choice import Choice, Pick, choose

if TYPE_CHECKING:
    from plait.adapters.bundle import Bundle
    from plait.platform.server.access import Access
    from plait.platform.server.adapters.service import AdapterService
    from plait.platform.server.context import ServerContext
    from plait.platform.server.schemas import AdapterChoice
    from plait.platform.text.tokenizer import Tokenizer

_NUM_NAMED = 10  # adapters, where one is not found


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What answers one request: the base model, perhaps with adapters on it."""

    model: str  # as the client named it
    adapters: tuple[Chosen, ...]
    bundle: Bundle | None  # of the only adapter: several could contradict each other
    tokenizer: Tokenizer

    @property
    def generation(self) -> str | list[str] | None:
        """For the answer's `adapter_generation`."""
        generations = [one.info.generation for one in self.adapters]
        return generations[0] if len(generations) == 1 else generations or None

    @property
    def vocab_size(self) -> int:
        """Width of the vocabulary, where adapters widen it; else 0."""
        return max((one.info.vocab_size or 0 for one in self.adapters), default=0)


async def resolve(
    context: ServerContext,
    body: AdapterChoice,
    access: Access,
    held: ExitStack,
    *,
    time_left_s: Callable[[], float | None] = lambda: None,
) -> Target:
    """Look up what `body` asks for; leases are released by `held`.

    Waits for an adapter that has to be loaded from the adapter directory first. Raises
    `ModelNotFound` alike for what is not there and for what the caller may not use; `BadRequest`.
    """
    served = context.model_name
    choice = choose(body, served)
    found: list[tuple[Named, float]] = []
    for name, generation, scale in choice.picks:
        pick, left_s = (name, generation, scale), time_left_s()
        try:
            named = await asyncio.wait_for(_take(context, pick, access, held), left_s)
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's timeout passed while its adapter loaded"
            ) from None
        if named is None:
            raise not_found(context, access, _shown(choice, pick), choice.param)
        found.append((named, scale))
    adapters = compose(
        [Chosen(name=named.name, info=named.info, scale=scale) for named, scale in found],
        choice.param,
    )
    kept = [named for named, scale in found if scale]
    only = kept[0] if len(kept) == 1 else None
    tokenizer_of = context.adapters.tokenizer
    return Target(
        model=served if body.model is None else body.model,
        adapters=adapters,
        bundle=None if only is None else only.bundle,
        tokenizer=tokenizer_for(
            [(one, tokenizer_of(one.info.generation)) for one in adapters],
            context.tokenizer,
            choice.param,
        ),
    )


def visible(context: ServerContext, access: Access) -> list[Named]:
    """The loaded adapters that the caller may use."""
    return [n for n in context.adapters.registry.entries() if access.may_use(n.name)]


def not_found(context: ServerContext, access: Access, name: str, param: str) -> ModelNotFound:
    """The one answer for all that is not there, or not for this caller: it says what is."""
    shown = name if len(name) <= 128 else name[:128] + "…"
    message = f"model {shown!r} is not served here; {context.model_name!r} is"
    adapters = [named.name for named in visible(context, access)]
    if adapters:
        few, num_left = adapters[:_NUM_NAMED], len(adapters) - _NUM_NAMED
        more = f" and {num_left} more (GET /v1/models)" if num_left > 0 else ""
        message += f", and its adapters are: {', '.join(map(repr, few))}{more}"
    return ModelNotFound(message, param=param)


async def _take(
    context: ServerContext, pick: Pick, access: Access, held: ExitStack
) -> Named | None:
    """What one pick points to, leased; None where there is none for this caller."""
    service = context.adapters
    name, generation, _ = pick
    if generation is not None:
        names = service.registry.names_of(generation)
        name = next((n for n in names if access.may_use(n)), None)
    if name is None or not access.may_use(name):
        return None
    if name not in service.registry and not await context.demand(name):
        return None
    return _lease(service, name, held)


def _lease(service: AdapterService, name: str, held: ExitStack) -> Named | None:
    try:
        named = service.registry.get(name)
    except AdapterNotFound:  # unloaded again while others waited for it too
        return None
    held.callback(service.release, service.registry.use([name]))
    return named


def _shown(choice: Choice, pick: Pick) -> str:
    """How the request itself named what it did not get."""
    name, generation, _ = pick
    if choice.param == "model" and choice.model is not None:
        return choice.model
    return generation or name or ""
