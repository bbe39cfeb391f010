"""Adapters of an `LLM`: the names, the store and the leases of one process."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.adapters.composition import MAX_SCALE, Chosen, compose
from plait.adapters.registry import AdapterRegistry, Lease, Named, Wish
from plait.adapters.sources import find_adapter
from plait.adapters.store import AdapterStore, StoredAdapter
from plait.platform.bundles import (
    bundled_constraint,
    fit_tokenizer,
    tokenizer_for,
    tokenizer_of,
)
from plait.platform.errors import (
    AdapterError,
    AdapterUnavailable,
    BadRequest,
    InvalidLoadPolicy,
    PlaitError,
    by_code,
)
from plait.platform.messages import AdapterLoaded, LoadAdapter

if TYPE_CHECKING:
    from plait.adapters.bundle import Bundle
    from plait.platform.engine import Engine
    from plait.platform.offline.running import Running
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.spec import GrammarSpec

# A name, several with their scales, or the base alone.
Adapter = str | Sequence[tuple[str, float]] | None
MAX_NAMES = 1 << 16


class LocalAdapters:
    """What `LLM` knows of its adapters. `running` steps for all that is under way."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, running: Running) -> None:
        served = engine.config.model.name
        self._registry = AdapterRegistry(is_served=lambda name: name == served, max_names=MAX_NAMES)
        self._engine = engine
        self._tokenizer = tokenizer
        self._running = running
        self._tokenizers: dict[str, Tokenizer] = {}
        self._num_stored: Counter[str] = Counter()
        self._root: Path | None = None
        self._opened: AdapterStore | None = None

    # --- loading ---

    def load(
        self,
        wish: Wish,
        *,
        source: str | Path | None,
        tensors: Mapping[str, Any] | None,
        config: Mapping[str, Any] | None,
    ) -> Named:
        """See `LLM.load_adapter`."""
        if self._engine.config.options.adapter_memory_bytes == 0:
            raise AdapterUnavailable("this LLM serves no adapters: adapter_memory_bytes is 0")
        self._registry.check(wish)
        stored = self._stored(source, tensors, config)
        self._num_stored[stored.generation] += 1
        lease = self._registry.hold(stored.generation)
        try:
            served = self._engine.config
            chosen = served.options.chat_template is not None
            tokenizer = tokenizer_of(stored, self._tokenizer, keep_template=chosen)
            loaded = self._load(wish, stored, tokenizer)
            if loaded.info is None:
                raise _error_of(loaded)
            width = loaded.info.vocab_size or served.model.vocab_size
            tokenizer, info = fit_tokenizer(tokenizer, loaded.info, width)
            self._tokenizers[stored.generation] = tokenizer
            before = self._registry.generation_of(wish.name)
            named = self._registry.publish(
                wish, info, bundle=stored.bundle, created=int(time.time())
            )
            self._fit_pins(named.generation, before)
        finally:
            lease.release()
            self._sweep()
        return named

    def _stored(
        self,
        source: str | Path | None,
        tensors: Mapping[str, Any] | None,
        config: Mapping[str, Any] | None,
    ) -> StoredAdapter:
        if (source is None) == (tensors is None) or (tensors is None) != (config is None):
            raise InvalidLoadPolicy(
                "give either source, or tensors together with config", param="source"
            )
        if tensors is None:
            return self._store.add_directory(find_adapter(str(source)).directory)
        from safetensors.torch import save

        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return self._store.add_tensors(config or {}, save(plain))

    def _load(self, wish: Wish, stored: StoredAdapter, tokenizer: Tokenizer) -> AdapterLoaded:
        """Step until the engine has answered; what else runs goes on meanwhile."""
        self._engine.load_adapter(
            LoadAdapter(
                generation=stored.generation,
                directory=str(stored.directory),
                pinned=wish.pinned,
                allow_zero_delta=wish.allow_zero_delta,
                added_tokens=tokenizer.added_tokens,
            )
        )
        while True:
            for result in self._engine.take_adapter_results():
                if result.generation == stored.generation:
                    return result
            self._running.step()

    def unload(self, name: str, expected_generation: str | None) -> None:
        """See `LLM.unload_adapter`."""
        named = self._registry.unload(name, expected_generation=expected_generation)
        self._fit_pins(named.generation)
        self._sweep()

    def entries(self) -> list[Named]:
        """What is loaded, by name."""
        return self._registry.entries()

    def close(self) -> None:
        """Remove all copies."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    # --- using ---

    def choose(self, adapter: Adapter, held: ExitStack) -> tuple[Chosen, ...]:
        """What one prompt asks for, leased until `held` closes. Raises `PlaitError` by name."""
        picks = [(adapter, 1.0)] if isinstance(adapter, str) else list(adapter or ())
        lease = self._registry.use([name for name, _ in picks])
        held.callback(self.release, lease)
        found = [(self._registry.get(name), scale) for name, scale in picks]
        return compose([Chosen(name=n.name, info=n.info, scale=s) for n, s in found], "adapter")

    def release(self, lease: Lease) -> None:
        """A prompt's answers have ended."""
        with self._running.turns:
            lease.release()
            self._sweep()

    def bundle(self, adapter: Adapter) -> Bundle | None:
        """The bundle that counts: of one adapter, as several could contradict each other."""
        names = _names(adapter)
        return self._registry.get(names[0]).bundle if len(names) == 1 else None

    def constraint(self, adapter: Adapter) -> GrammarSpec | None:
        """What answers with an adapter must obey where nothing else is asked."""
        return bundled_constraint(self.bundle(adapter))

    def tokenizer(self, adapter: Adapter) -> Tokenizer:
        """The tokenizer of prompts and answers with an adapter, with its chat template."""
        names = _names(adapter)
        infos = [self._registry.get(name).info for name in names]
        found = [
            (Chosen(name=name, info=info), self._tokenizers[info.generation])
            for name, info in zip(names, infos, strict=True)
        ]
        return tokenizer_for(found, self._tokenizer, "adapter")

    # --- small things ---

    @property
    def _store(self) -> AdapterStore:
        if self._opened is None:
            self._root = Path(tempfile.mkdtemp(prefix="plait-adapters-"))
            # A script that ends without `close` leaves no copies behind either.
            weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
            self._opened = AdapterStore(self._root)
        return self._opened

    def _fit_pins(self, *generations: str | None) -> None:
        for generation in generations:
            if generation is not None and self._registry.names_of(generation):
                self._engine.pin_adapter(generation, self._registry.is_pinned(generation))

    def _sweep(self) -> None:
        for generation in self._registry.take_unreferenced():
            self._tokenizers.pop(generation, None)
            self._engine.drop_adapter(generation)
            num_stored = self._num_stored.pop(generation, 0)
            if self._opened is not None:  # else all copies are gone
                for _ in range(num_stored):
                    self._opened.remove(generation)


def _error_of(loaded: AdapterLoaded) -> PlaitError:
    code, message = loaded.error or ("internal_error", "the adapter could not be loaded")
    cls = by_code(code)
    if issubclass(cls, AdapterError):
        return cls(message, report=loaded.report)
    return cls(message)


def per_prompt(adapter: Any, count: int) -> list[Adapter]:
    """One choice for each prompt. A list of (name, scale) is one choice; other lists are many."""
    if adapter is None or isinstance(adapter, str) or _is_composition(adapter):
        return [adapter] * count
    if isinstance(adapter, Mapping) or not isinstance(adapter, Iterable):
        raise _not_an_adapter(adapter)
    several = list(adapter)
    _check_scales(several)
    for one in several:
        if not (one is None or isinstance(one, str) or _is_composition(one)):
            _check_scales(one)
            raise _not_an_adapter(one)
    if len(several) != count:
        raise BadRequest(
            f"{len(several)} adapters for {count} prompts: give one for all, or one each",
            param="adapter",
        )
    return several


def _is_composition(adapter: Any) -> bool:
    return (
        isinstance(adapter, list | tuple)
        and bool(adapter)
        and all(_is_scaled(pick) and _is_number(pick[1]) for pick in adapter)
    )


def _is_scaled(pick: Any) -> bool:
    return isinstance(pick, tuple) and len(pick) == 2 and isinstance(pick[0], str)


def _is_number(scale: Any) -> bool:
    return isinstance(scale, int | float) and not isinstance(scale, bool)


def _check_scales(picks: Any) -> None:
    """Raises `BadRequest` for a (name, scale) whose scale is no number."""
    for name, scale in filter(_is_scaled, picks if isinstance(picks, list | tuple) else ()):
        if not _is_number(scale):
            raise BadRequest(
                f"adapter {name[:64]!r}: scale must be a number in [-{MAX_SCALE:g}, "
                f"{MAX_SCALE:g}], not {str(scale)[:80]!r}",
                param="adapter",
            )


def _not_an_adapter(value: Any) -> BadRequest:
    return BadRequest(
        f"adapter is a name, a list of (name, scale), or a list with one for each prompt, not "
        f"{str(value)[:80]!r}",
        param="adapter",
    )


def _names(adapter: Adapter) -> list[str]:
    if isinstance(adapter, str):
        return [adapter]
    return [name for name, scale in adapter or () if scale]
