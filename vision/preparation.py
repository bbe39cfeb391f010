"""Fetches and decodes the images of requests, off the event loop and within shared bounds.

Two budgets bound the memory of all requests together: one for files, one for decoded images,
which stay counted until nobody holds their pixels. A request asks each of them once, for all its
images, and the second only while it holds the first: so no two can wait for each other.
The same file asked for by several requests at the same time is decoded once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from plait.platform.errors import ImageTooLarge, PlaitError
from plait.vision.budget import ByteBudget
from plait.vision.decode import DecodedImage, ImageFileInfo, decode, inspect
from plait.vision.fetch import Fetcher, Resolver
from plait.vision.gathering import all_of
from plait.vision.hosts import AllowList
from plait.vision.limits import ImageLimits, amount
from plait.vision.parts import ImagePart
from plait.vision.shrink import low_detail
from plait.vision.sources import (
    DataUrl,
    ImageBytes,
    ImagePath,
    ImagePixels,
    WebUrl,
    read_data_url,
    read_path,
    read_pixels,
)

P = ParamSpec("P")
T = TypeVar("T")

# Read as far as its header; pixels that were handed over need no more.
_Read = ImageFileInfo | DecodedImage


class ImagePreparation:
    """From the images of a request to their pixels. One for a server, or for an `LLM`.

    All calls come from one event loop, or all through `prepare_blocking`, from one thread.
    """

    def __init__(
        self,
        limits: ImageLimits | None = None,
        allowed: AllowList | None = None,
        *,
        resolve: Resolver | None = None,
    ) -> None:
        self.limits = limits or ImageLimits()
        self._fetcher = Fetcher(self.limits, allowed or AllowList(), resolve=resolve)
        self._pool = ThreadPoolExecutor(self.limits.num_threads, thread_name_prefix="plait-image")
        wait_s = self.limits.wait_s
        self.files = ByteBudget(
            self.limits.file_budget_bytes, what="the files of images", wait_s=wait_s
        )
        self.pixels = ByteBudget(
            self.limits.pixel_budget_bytes, what="decoded images", wait_s=wait_s
        )
        self._decoding: dict[tuple[str, str], _Shared] = {}

    async def prepare(self, parts: Sequence[ImagePart]) -> list[DecodedImage]:
        """The images, in their order.

        Ends at once when cancelled; a decoder that runs ends by its own bounds. Raises `BadRequest`
        with the part at fault as `param`, `Overloaded` where the budgets stay full.
        """
        if not parts:
            return []
        limits = self.limits
        if len(parts) > limits.num_images:
            raise ImageTooLarge(
                f"{len(parts)} images are more than {limits.num_images} (--max-images)",
                param=parts[-1].at,
            )
        with ExitStack() as held:
            most = min(sum(self._most_bytes(part) for part in parts), limits.request_bytes)
            files = await self.files.reserve(most)
            held.callback(files.free)
            count = _FileBytes(limits.request_bytes)
            read = await all_of(self._at(part, self._read, part, count) for part in parts)
            sizes = [3 * _num_pixels(one) for one in read]
            if sum(sizes) > 3 * limits.request_pixels:
                raise ImageTooLarge(
                    f"the request's images have {sum(sizes) // 3} pixels together; at most "
                    f"{limits.request_pixels} are taken. Send fewer, or smaller ones",
                    param=parts[-1].at,
                )
            pixels = await self.pixels.reserve(sum(sizes))
            held.callback(pixels.free)
            images = await all_of(
                self._at(part, self._decode, one, part.detail)
                for part, one in zip(parts, read, strict=True)
            )
            for image in images:
                pixels.hold_for(image.pixels, image.pixels.nbytes)
            return images

    def prepare_blocking(self, parts: Sequence[ImagePart]) -> list[DecodedImage]:
        """`prepare` for callers without an event loop, or inside of one that they block."""
        if not parts:
            return []
        with ThreadPoolExecutor(1, thread_name_prefix="plait-images") as one:
            return one.submit(asyncio.run, self.prepare(parts)).result()

    def close(self) -> None:
        """End the threads."""
        self._fetcher.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _most_bytes(self, part: ImagePart) -> int:
        match part.source:
            case DataUrl() as source:
                return min(len(source.url), self.limits.image_bytes)
            case ImageBytes(data=data):
                return min(len(data), self.limits.image_bytes)
            case ImagePixels():
                return 0
            case _:
                return self.limits.image_bytes

    async def _at(
        self, part: ImagePart, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Say of errors which image they are about.

        The work is made here: where this is cancelled before it runs, none is left unawaited.
        """
        try:
            return await work(*args, **kwargs)
        except PlaitError as error:
            if error.param is None and error.status < 500:
                # A new one: others who wait for the same image get the same object.
                raise type(error)(f"{part.at}: {error.message}", param=part.at) from None
            raise

    async def _read(self, part: ImagePart, count: _FileBytes) -> _Read:
        match part.source:
            case WebUrl(url=url):
                data = await self._fetcher.fetch(url, count.take)
            case ImagePixels() as source:
                return await self._in_pool(read_pixels, source, self.limits)
            case DataUrl() | ImageBytes() | ImagePath() as source:
                data = await self._in_pool(_file, source, self.limits)
                count.take(len(data))
        return await self._in_pool(inspect, data, self.limits)

    async def _decode(self, read: _Read, detail: str) -> DecodedImage:
        """Decode, or wait for who decodes the same. Whoever waits last and leaves cancels it."""
        key = (read.digest, detail)
        shared = self._decoding.get(key)
        if shared is None:
            shared = _Shared(future=asyncio.ensure_future(self._in_pool(_shown, read, detail)))
            self._decoding[key] = shared
        shared.num_waiting += 1
        try:
            return await asyncio.shield(shared.future)
        finally:
            shared.num_waiting -= 1
            if shared.num_waiting == 0:
                shared.future.cancel()
                self._decoding.pop(key, None)

    async def _in_pool(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


@dataclass(slots=True, kw_only=True, eq=False)
class _Shared:
    """An image being decoded, and how many wait for it."""

    future: asyncio.Future[DecodedImage]
    num_waiting: int = 0


class _FileBytes:
    """Counts the bytes of one request's files as they come."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._count = 0

    def take(self, num_bytes: int) -> None:
        """Raises `ImageTooLarge` beyond the bound."""
        self._count += num_bytes
        if self._count > self._bound:
            raise ImageTooLarge(
                f"the request's image files are larger than {amount(self._bound)} together"
            )


def _file(source: DataUrl | ImageBytes | ImagePath, limits: ImageLimits) -> bytes:
    match source:
        case DataUrl():
            return read_data_url(source, limits)
        case ImageBytes(data=data):
            return data
        case ImagePath():
            return read_path(source, limits)


def _shown(read: _Read, detail: str) -> DecodedImage:
    image = read if isinstance(read, DecodedImage) else decode(read)
    return low_detail(image) if detail == "low" else image


def _num_pixels(read: _Read) -> int:
    return read.width * read.height if isinstance(read, DecodedImage) else read.num_pixels
