"""The draft model's adapter that comes with an adapter: a folder beside its weights.

    my-adapter/plait_adapter.json              {"draft_adapter": "draft", …}
    my-adapter/adapter_model.safetensors, adapter_config.json
    my-adapter/draft/adapter_model.safetensors, adapter_config.json

It is loaded, placed, evicted and dropped with the adapter that brings it, under the same
generation, and its bytes count as that one's. It never changes an answer, only how well the draft
model guesses; without a draft model it is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from plait.adapters.bundle import parse_bundle
from plait.adapters.files import (
    BUNDLE,
    CONFIG,
    WEIGHTS,
    FileLimits,
    open_directory,
    open_inner,
    open_weights,
    read_small,
)
from plait.adapters.identity import generation_of
from plait.platform.errors import AdapterError, InvalidAdapter

if TYPE_CHECKING:
    from plait.adapters.adapter import Adapter
    from plait.adapters.pool import Load, Places

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFiles:
    """The open files of a draft model's adapter."""

    name: str  # of its folder
    config: bytes
    weights: BinaryIO


@contextmanager
def open_draft(
    folder: int, bundle: bytes | None, limits: FileLimits, *, follow_links: bool = False
) -> Iterator[DraftFiles | None]:
    """Those of the folder that the bundle in an open directory names; None where it names none.

    Raises `InvalidAdapter`, which tells that it is about the draft model's adapter.
    """
    name = None if bundle is None else parse_bundle(bundle, limits).draft_adapter
    if name is None:
        yield None
        return
    with ExitStack() as opened:
        with _about(name):
            inner = opened.enter_context(open_inner(folder, name, follow_links=follow_links))
            config = _config(inner, limits, follow_links)
            weights = opened.enter_context(open_weights(inner, limits, follow_links=follow_links))
        yield DraftFiles(name=name, config=config, weights=weights)


def _config(folder: int, limits: FileLimits, follow_links: bool) -> bytes:
    try:
        return read_small(folder, CONFIG, limit=limits.of(CONFIG), follow_links=follow_links)
    except FileNotFoundError:
        raise InvalidAdapter(f"{CONFIG} is missing") from None


def digest_draft(
    folder: int, bundle: bytes | None, limits: FileLimits, *, follow_links: bool = False
) -> str | None:
    """What its files are, as `identity.generation_of` wants it."""
    with open_draft(folder, bundle, limits, follow_links=follow_links) as draft:
        if draft is None:
            return None
        weights = sha256()
        while part := draft.weights.read(_CHUNK):
            weights.update(part)
        return generation_of(
            {CONFIG: sha256(draft.config).hexdigest(), WEIGHTS: weights.hexdigest()}
        )


@contextmanager
def _about(name: str) -> Iterator[None]:
    try:
        yield
    except AdapterError as error:
        raise InvalidAdapter(f"draft_adapter {name!r}: {error.message}") from error


def load_with_draft(
    generation: str,
    directory: Path,
    *,
    allow_zero_delta: bool,
    load: Load,
    load_draft: Load | None,
) -> Adapter:
    """Read an adapter, and that of the draft model with it.

    `load` and `load_draft` read for the one and the other model; None: there is no draft model.
    """
    adapter = load(generation, directory, allow_zero_delta=allow_zero_delta)
    name = _name_in(directory)
    if name is None:
        return adapter
    if load_draft is None:
        return _warned(adapter, f"no draft model is served that could use draft_adapter {name!r}")
    with _about(name):
        draft = load_draft(generation, directory / name, allow_zero_delta=True)
        _check_plain(draft)
    info = replace(
        adapter.info,
        draft=generation,
        num_bytes=adapter.info.num_bytes + draft.info.num_bytes,
    )
    return replace(adapter, info=info, draft=draft)


def _name_in(directory: Path) -> str | None:
    limits = FileLimits()
    with open_directory(directory) as folder:
        try:
            bundle = read_small(folder, BUNDLE, limit=limits.of(BUNDLE))
        except FileNotFoundError:
            return None
    return parse_bundle(bundle, limits).draft_adapter


def _check_plain(draft: Adapter) -> None:
    """It goes wherever the adapter that brings it goes: at any scale, beside others."""
    if draft.rows or draft.wholes:
        raise InvalidAdapter("it replaces rows of an embedding or head: only LoRA is served there")
    if draft.info.has_dora:
        raise InvalidAdapter("it is a DoRA adapter: only LoRA is served there")
    if draft.info.invocation_token_ids:
        raise InvalidAdapter(
            "it waits for an invocation of its own: it is active where the adapter is that brings "
            "it"
        )


def _warned(adapter: Adapter, warning: str) -> Adapter:
    report = replace(adapter.info.report, warnings=(*adapter.info.report.warnings, warning))
    return replace(adapter, info=replace(adapter.info, report=report))


class BothPlaces:
    """Implements `pool.Places`: two models, of which each gets its part of an adapter."""

    def __init__(self, target: Places, draft: Places) -> None:
        self._target = target
        self._draft = draft

    def adapter_bytes(self, adapter: Adapter) -> int:
        """See `executor.Executor`."""
        beside = 0 if adapter.draft is None else self._draft.adapter_bytes(adapter.draft)
        return self._target.adapter_bytes(adapter) + beside

    def place_adapter(self, adapter: Adapter) -> None:
        """See `executor.Executor`. The draft model's comes first: who has the other has both."""
        if adapter.draft is not None:
            self._draft.place_adapter(adapter.draft)
        self._target.place_adapter(adapter)

    def remove_adapter(self, generation: str) -> None:
        """See `executor.Executor`."""
        self._target.remove_adapter(generation)
        self._draft.remove_adapter(generation)
