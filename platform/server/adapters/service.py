"""The adapters of one server: loading, replacing, unloading, and what a request may use of them.

A load is: copy into the store (in a thread) → have the engine read the copy → let the name point
there. Whatever fails on the way leaves the name as it was. What neither a name nor a lease leads to
any more is dropped from the engine and removed from the store.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plait.adapters.registry import AdapterRegistry, Lease, Named, Wish, is_name
from plait.adapters.sources import find_adapter
from plait.platform.bundles import fit_tokenizer, tokenizer_of
from plait.platform.errors import (
    AdapterBusy,
    AdapterError,
    AdapterPathForbidden,
    AdapterPathNotFound,
    AdapterUnavailable,
    ConfigError,
    InvalidAdapter,
    PlaitError,
)

if TYPE_CHECKING:
    from plait.adapters.info import AdapterInfo
    from plait.adapters.store import AdapterStore, StoredAdapter
    from plait.platform.server.client import EngineClient
    from plait.platform.server.settings import NamedSource, ServerSettings
    from plait.platform.text.tokenizer import Tokenizer

T = TypeVar("T")
Read = Callable[["AdapterStore"], "StoredAdapter"]
log = logging.getLogger("plait.server")

_NUM_READERS = 2  # adapters that are copied at a time
_UNFIT_S = 5.0  # that a folder which does not fit is not tried again for a request
_NUM_UNFIT = 256


class AdapterService:
    """See the module. All calls run on the event loop."""

    def __init__(
        self,
        client: EngineClient,
        settings: ServerSettings,
        tokenizer: Tokenizer,
        *,
        is_served: Callable[[str], bool],
    ) -> None:
        self.registry = AdapterRegistry(is_served=is_served, max_names=settings.max_adapters)
        self._is_served = is_served
        self._client = client
        self._tokenizer = tokenizer
        self._directory = None if settings.adapter_dir is None else Path(settings.adapter_dir)
        self._threads = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="plait-adapter")
        self._loading: dict[str, asyncio.Task[Named]] = {}
        self._store: AdapterStore | None = None
        self._root: Path | None = None
        self._num_stored: Counter[str] = Counter()  # holds of the store, by generation
        self._unfit: dict[str, tuple[float, AdapterError]] = {}  # folders, and until when
        self.num_waiting = 0  # requests for an adapter that is not there yet
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tokenizers: dict[str, Tokenizer] = {}  # of generations that bring their own

    # --- loading ---

    async def load_source(self, wish: Wish, source: str) -> Named:
        """Load what the operator named: any directory, or a hub id."""
        return await self.load(wish, lambda s: s.add_directory(find_adapter(source).directory))

    async def load_all(self, sources: tuple[NamedSource, ...]) -> None:
        """Load those of the start, one after the other. Raises the first one's error, named."""
        for each in sources:
            try:
                await self.load_source(Wish(name=each.name), each.source)
            except PlaitError as error:
                raise ConfigError(
                    f"adapter {each.name}: {error.message}", param="adapters"
                ) from error

    async def load_path(self, wish: Wish, path: str, *, owner: str = "") -> Named:
        """Load a folder below the adapter directory, and nothing from elsewhere."""
        jail = self._directory
        if jail is None:
            raise AdapterPathForbidden(
                "this server loads adapters from no directory: start it with --adapter-dir",
                param="lora_path",
            )
        return await self.load(wish, lambda store: _add_inside(store, path, jail), owner=owner)

    async def load_tensors(
        self, wish: Wish, config: bytes, weights: bytes, *, owner: str = ""
    ) -> Named:
        """Load an adapter that came as a safetensors file's bytes with its config's."""
        return await self.load(wish, lambda s: s.add_tensors(config, weights), owner=owner)

    async def load(
        self, wish: Wish, read: Read, *, on_demand: bool = False, owner: str = ""
    ) -> Named:
        """Load and publish; whoever waits may go away, and it still ends. Raises `AdapterError`."""
        self._check_enabled()
        self.registry.check(wish)
        if wish.name in self._loading:
            raise AdapterBusy(
                f"adapter {wish.name!r} is being loaded already: try again when that is done",
                param="lora_name",
            )
        task = asyncio.create_task(self._load(wish, read, on_demand, owner))
        self._loading[wish.name] = task
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return await asyncio.shield(task)

    async def _load(self, wish: Wish, read: Read, on_demand: bool, owner: str) -> Named:
        lease: Lease | None = None
        try:
            stored, lease = await self._read(read)
            tokenizer = await self._in_thread(self._tokenizer_of, stored)
            info = await self._client.load_adapter(
                stored.generation,
                str(stored.directory),
                pinned=wish.pinned,
                allow_zero_delta=wish.allow_zero_delta,
                added_tokens=tokenizer.added_tokens,
            )
            info = await self._in_thread(self._take_tokenizer, info, tokenizer)
            before = self.registry.generation_of(wish.name)
            named = self.registry.publish(
                wish,
                info,
                bundle=stored.bundle,
                on_demand=on_demand,
                created=int(time.time()),
                owner=owner,
            )
            await self._fit_pins({named.generation, before})
            return named
        except PlaitError:
            if lease is not None:  # it may be pinned by now, for a name that it does not get
                await self._fit_pins({*lease.generations})
            raise
        finally:
            del self._loading[wish.name]
            if lease is not None:
                lease.release()
            self._sweep_soon()

    async def _read(self, read: Read) -> tuple[StoredAdapter, Lease]:
        """Copy into the store, which holds the copy until it is told otherwise."""
        if self._store is None:  # made when first needed: most servers have no adapters
            self._root, self._store = _make_store()
        stored = await self._in_thread(read, self._store)
        self._num_stored[stored.generation] += 1
        return stored, self.registry.hold(stored.generation)

    def _tokenizer_of(self, stored: StoredAdapter) -> Tokenizer:
        config = self._client.config
        chosen = config is not None and config.options.chat_template is not None
        return tokenizer_of(stored, self._tokenizer, keep_template=chosen)

    def _take_tokenizer(self, info: AdapterInfo, tokenizer: Tokenizer) -> AdapterInfo:
        config = self._client.config
        width = info.vocab_size or (0 if config is None else config.model.vocab_size)
        fitting, info = fit_tokenizer(tokenizer, info, width)
        if fitting is not self._tokenizer:
            self._tokenizers[info.generation] = fitting
        return info

    async def _fit_pins(self, generations: set[str | None]) -> None:
        for generation in generations - {None}:
            assert generation is not None, "just taken out"
            if self.registry.names_of(generation):
                pinned = self.registry.is_pinned(generation)
                await self._client.pin_adapter(generation, pinned=pinned)

    # --- on demand ---

    async def demand(self, name: str) -> bool:
        """Have the adapter directory's folder `name` loaded, if there is one; false if not.

        Whoever asks meanwhile waits for the same load. Raises what makes it fail.
        """
        jail = self._directory
        if jail is None or not is_name(name) or name.startswith(".") or self._is_served(name):
            return False
        self.num_waiting += 1
        try:
            return await self._demand(name, jail)
        finally:
            self.num_waiting -= 1

    async def _demand(self, name: str, jail: Path) -> bool:
        task = self._loading.get(name)
        if task is None:
            self._check_fit(name)
            if not await asyncio.to_thread((jail / name).is_dir):
                return False
            task = self._loading.get(name)
        try:
            if task is not None:
                await asyncio.shield(task)
            elif name not in self.registry:
                await self.load(
                    Wish(name=name), lambda s: _add_inside(s, name, jail), on_demand=True
                )
        except (AdapterPathNotFound, AdapterPathForbidden) as error:
            log.warning("adapter directory: %s", error.message)
            return False
        except AdapterError as error:
            if error.status == InvalidAdapter.status:
                self._remember_unfit(name, error)
            raise
        return True

    def _check_fit(self, name: str) -> None:
        """Raise again what a moment ago made the folder unfit: reading it anew costs too much."""
        until_s, error = self._unfit.get(name, (0.0, None))
        if error is not None and time.monotonic() < until_s:
            raise type(error)(error.message, param=error.param, report=error.report)

    def _remember_unfit(self, name: str, error: AdapterError) -> None:
        self._unfit.pop(name, None)
        if len(self._unfit) >= _NUM_UNFIT:
            del self._unfit[next(iter(self._unfit))]
        self._unfit[name] = (time.monotonic() + _UNFIT_S, error)

    # --- letting go ---

    async def unload(self, name: str, *, expected_generation: str | None = None) -> Named:
        """Forget a name at once; requests that use it go on. Raises as the registry does."""
        named = self.registry.unload(name, expected_generation=expected_generation)
        await self._fit_pins({named.generation})
        self._sweep_soon()
        return named

    async def pin(self, name: str, *, pinned: bool) -> Named:
        """Keep an adapter on the device, or let it go. Raises `AdapterBytesExceeded`."""
        before = self.registry.get(name)
        named = self.registry.pin(name, pinned=pinned)
        try:
            await self._fit_pins({named.generation})
        except AdapterError:
            if self.registry.generation_of(name) == named.generation:
                self.registry.pin(name, pinned=before.pinned)
            raise
        return named

    def release(self, lease: Lease) -> None:
        """A request has ended."""
        lease.release()
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        if self.registry.has_suspects:
            self._keep(self._sweep())

    async def _sweep(self) -> None:
        """Drop and remove what nobody can reach. A copy that is just made has its own hold."""
        for generation in self.registry.take_unreferenced():
            if self.registry.is_referenced(generation):
                continue  # loaded again while one before it was removed
            num_holds = self._num_stored.pop(generation, 0)
            self._tokenizers.pop(generation, None)
            await self._client.drop_adapter(generation)
            for _ in range(num_holds):
                assert self._store is not None, "something was stored"
                await self._in_thread(self._store.remove, generation)

    async def close(self) -> None:
        """End loads, and remove every copy."""
        for task in [*self._loading.values(), *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._loading.values(), *self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._store is not None:
            self._store.close()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    # --- small things ---

    @property
    def is_enabled(self) -> bool:
        """Whether the engine has any memory for adapters."""
        config = self._client.config
        return config is None or config.options.adapter_memory_bytes != 0

    def _check_enabled(self) -> None:
        if not self.is_enabled:
            raise AdapterUnavailable(
                "this server serves no adapters: it was started with --adapter-memory 0"
            )

    def tokenizer(self, generation: str) -> Tokenizer:
        """The model's tokenizer, with the tokens and chat template that the generation brings."""
        return self._tokenizers.get(generation, self._tokenizer)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("adapters: freeing failed", exc_info=task.exception())


def _make_store() -> tuple[Path, AdapterStore]:
    from plait.adapters.store import AdapterStore

    root = Path(tempfile.mkdtemp(prefix="plait-adapters-"))
    return root, AdapterStore(root)


def _add_inside(store: AdapterStore, path: str, jail: Path) -> StoredAdapter:
    """A path of a client: relative to the jail, or absolute and then below it."""
    given = Path(path)
    if given.is_absolute():
        if not given.is_relative_to(jail.absolute()):
            raise AdapterPathForbidden(
                "lora_path leads out of the adapter directory", param="lora_path"
            )
        given = given.relative_to(jail.absolute())
    return store.add_directory(given, inside=jail)
