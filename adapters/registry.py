"""Names of adapters, the generations they point to, and who still needs which.

A generation is content and never changes; a name is a pointer that moves. Whoever is about to use
a generation holds a lease of it, so it outlives the names that led there. A generation with
neither name nor lease is handed out once by `take_unreferenced`, and forgotten.

Plain data of one thread (the server's event loop, or the caller of `LLM`): nothing is read or
loaded here, and each call either does all that it says or raises and changes nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.adapters.info import CHANGES_NOTHING, AdapterInfo
from plait.platform.errors import (
    AdapterAlreadyLoaded,
    AdapterGenerationMismatch,
    AdapterLimitExceeded,
    AdapterNotFound,
    InvalidAdapter,
    InvalidAdapterName,
    InvalidLoadPolicy,
)

if TYPE_CHECKING:
    from plait.adapters.bundle import Bundle

_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9._-]{1,64}\Z")
_GENERATION = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a load is to treat its name. An action: nothing of it is remembered but `pinned`."""

    name: str
    replace: bool = False  # move the name if it is taken
    expected_generation: str | None = None  # replace only this one; others are a conflict
    pinned: bool = False  # keep it on the device
    allow_zero_delta: bool = False  # take an adapter that changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A name and what it points to."""

    name: str
    info: AdapterInfo
    bundle: Bundle | None = None  # what the adapter brings for requests that use it
    pinned: bool = False
    on_demand: bool = False  # loaded by a request: gives way to others when names run out
    created: int = 0  # unix seconds
    owner: str = ""  # digest of the key that loaded it

    @property
    def generation(self) -> str:
        """SHA-256 (hex) of its content."""
        return self.info.generation


class Lease:
    """Keeps generations for as long as it is held. Releasing it twice does nothing."""

    __slots__ = ("_registry", "generations")

    def __init__(self, registry: AdapterRegistry, generations: tuple[str, ...]) -> None:
        self._registry: AdapterRegistry | None = registry
        self.generations = generations

    def release(self) -> None:
        """Give the generations back."""
        registry, self._registry = self._registry, None
        if registry is not None:
            registry._release(self.generations)


def is_name(text: str) -> bool:
    """Whether an adapter may be named so."""
    return _NAME.match(text) is not None


def is_generation(text: str) -> bool:
    """Whether `text` is written as a generation is: 64 lower-case hexadecimal digits."""
    return _GENERATION.match(text) is not None


class AdapterRegistry:
    """The one owner of names; see the module. no adapter takes a name that `is_served`."""

    def __init__(self, *, is_served: Callable[[str], bool], max_names: int) -> None:
        self.max_names = max_names
        self._is_served = is_served
        self._names: dict[str, Named] = {}  # least recently used first
        self._num_names: Counter[str] = Counter()  # by generation
        self._num_leases: Counter[str] = Counter()
        self._suspects: dict[str, None] = {}  # may have become unreferenced

    # --- reading ---

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def entries(self) -> list[Named]:
        """All names, by name."""
        return sorted(self._names.values(), key=lambda named: named.name)

    def get(self, name: str) -> Named:
        """What `name` points to. Raises `AdapterNotFound`."""
        named = self._names.get(name)
        if named is None:
            raise AdapterNotFound(f"no adapter {name[:64]!r} is loaded", param="lora_name")
        return named

    def generation_of(self, name: str) -> str | None:
        """Where `name` points now; None where it is not loaded."""
        named = self._names.get(name)
        return None if named is None else named.generation

    @property
    def has_suspects(self) -> bool:
        """Whether `take_unreferenced` may have something to give."""
        return bool(self._suspects)

    def names_of(self, generation: str) -> list[str]:
        """All names of a generation."""
        return [n.name for n in self._names.values() if n.generation == generation]

    def num_leases(self, generation: str) -> int:
        """Leases that are held of a generation."""
        return self._num_leases[generation]

    def is_referenced(self, generation: str) -> bool:
        """Whether a name or a lease leads to a generation."""
        return bool(self._num_names[generation] or self._num_leases[generation])

    def is_pinned(self, generation: str) -> bool:
        """Whether any name wants the generation to stay on the device."""
        return any(n.pinned for n in self._names.values() if n.generation == generation)

    # --- using ---

    def use(self, names: Iterable[str]) -> Lease:
        """Lease what the names point to now. Raises `AdapterNotFound`."""
        found = [self.get(name) for name in names]
        for named in found:
            self._names[named.name] = self._names.pop(named.name)
        return self.hold(*(named.generation for named in found))

    def hold(self, *generations: str) -> Lease:
        """Lease generations, named or not: one that is being loaded has no name yet."""
        self._num_leases.update(generations)
        return Lease(self, generations)

    def _release(self, generations: tuple[str, ...]) -> None:
        self._num_leases.subtract(generations)
        for generation in generations:
            if not self._num_leases[generation]:
                del self._num_leases[generation]
                self._suspects[generation] = None

    # --- names ---

    def check(self, wish: Wish) -> None:
        """Whether a load may begin: what `publish` would refuse now costs no reading.

        Raises the `AdapterError` that says why not.
        """
        self._check_name(wish.name)
        expected, current = wish.expected_generation, self._names.get(wish.name)
        if expected is not None and not wish.replace:
            raise InvalidLoadPolicy(
                "expected_generation says what to replace: it needs load_inplace (in LLM: replace)",
                param="expected_generation",
            )
        _check_expected(wish.name, expected, current)
        if current is not None and not wish.replace:
            raise AdapterAlreadyLoaded(
                f"adapter {wish.name!r} is loaded already: unload it, or replace it with "
                "load_inplace: true (in LLM: replace=True)",
                param="lora_name",
            )
        if current is None and len(self._names) >= self.max_names and self._spare() is None:
            raise AdapterLimitExceeded(
                f"{self.max_names} adapters are loaded, the most this server takes: unload one, "
                "or raise --max-adapters",
                param="lora_name",
            )

    def publish(
        self,
        wish: Wish,
        info: AdapterInfo,
        *,
        bundle: Bundle | None = None,
        on_demand: bool = False,
        created: int = 0,
        owner: str = "",
    ) -> Named:
        """Point the name at a generation that can be used. Raises as `check`, `InvalidAdapter`.

        What changes nothing may be loaded already, by somebody who meant that.
        """
        self.check(wish)
        if info.changes_nothing and not wish.allow_zero_delta:
            raise InvalidAdapter(CHANGES_NOTHING, report=info.report)
        before = self._names.get(wish.name)
        if before is None and len(self._names) >= self.max_names:
            spare = self._spare()
            assert spare is not None, "checked above"
            self._forget(spare)
        named = Named(
            name=wish.name,
            info=info,
            bundle=bundle,
            pinned=wish.pinned,
            on_demand=on_demand,
            created=created,
            owner=owner,
        )
        self._num_names[named.generation] += 1
        if before is not None:
            self._forget(before)
        self._names[named.name] = named
        return named

    def pin(self, name: str, *, pinned: bool) -> Named:
        """Keep what the name points to on the device, or let it go. Raises `AdapterNotFound`."""
        named = self._names[name] = replace(self.get(name), pinned=pinned)
        return named

    def unload(self, name: str, *, expected_generation: str | None = None) -> Named:
        """Forget a name; who holds a lease goes on.

        Raises `AdapterNotFound`, `AdapterGenerationMismatch`.
        """
        named = self.get(name)
        _check_expected(name, expected_generation, named)
        self._forget(named)
        return named

    def take_unreferenced(self) -> list[str]:
        """Generations that nobody can reach any more, each once: free what they hold."""
        suspects, self._suspects = self._suspects, {}
        return [g for g in suspects if not self.is_referenced(g)]

    def _forget(self, named: Named) -> None:
        del self._names[named.name]
        self._num_names[named.generation] -= 1
        if not self._num_names[named.generation]:
            del self._num_names[named.generation]
            self._suspects[named.generation] = None

    def _spare(self) -> Named | None:
        """The name that can best be missed: loaded by a request, long unused, in use by nobody."""
        return next(
            (
                named
                for named in self._names.values()
                if named.on_demand and not named.pinned and not self._num_leases[named.generation]
            ),
            None,
        )

    def _check_name(self, name: str) -> None:
        if not is_name(name):
            raise InvalidAdapterName(
                "an adapter's name has 1 to 64 letters, digits and ._- (not dots alone), "
                f"not {name[:80]!r}",
                param="lora_name",
            )
        if self._is_served(name):
            raise InvalidAdapterName(
                f"{name!r} is the name of the served model: give the adapter another",
                param="lora_name",
            )


def _check_expected(name: str, expected: str | None, current: Named | None) -> None:
    found = None if current is None else current.generation
    if expected is not None and expected != found:
        raise AdapterGenerationMismatch(
            f"adapter {name[:64]!r} is "
            + ("not loaded" if found is None else f"of generation {found}")
            + ", not of the expected one: nothing was changed",
            param="expected_generation",
        )
