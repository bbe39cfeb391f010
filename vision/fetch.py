"""Fetches an image from an allowed host, and from nowhere else.

A name is resolved once, every address it has must be allowed, and that very address is dialled
(with the name kept for the Host header and for TLS), so that a name which changes its mind
between check and use gains nothing. Each redirect goes the same way from the start. Neither
proxies, cookies nor credentials of the environment are used, and what a server says of its
content's type is not believed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx

from plait.platform.errors import ImageFetchFailed, ImageTooLarge
from plait.vision.hosts import AllowList, Target, is_public
from plait.vision.limits import ImageLimits, amount

if TYPE_CHECKING:
    import ssl

# The addresses of a host name.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NUM_RESOLVERS = 4


class Fetcher:
    """Fetches images. One for a server; `resolve` is the system's resolver unless given."""

    def __init__(
        self, limits: ImageLimits, allowed: AllowList, *, resolve: Resolver | None = None
    ) -> None:
        self._limits = limits
        self._allowed = allowed
        self._resolve = resolve or self._resolve_by_system
        # A semaphore belongs to one loop; each `prepare_blocking` has a loop of its own.
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._tls: ssl.SSLContext | None = None
        # Its own: a resolver that hangs must not hold up what else runs in the loop's threads.
        self._resolvers: ThreadPoolExecutor | None = None

    async def fetch(self, url: str, take: Callable[[int], None]) -> bytes:
        """The bytes at `url`; `take` is told of so many more, and may raise.

        Raises `ImageFetchFailed`, `ImageTooLarge`.
        """
        target = self._target(url)
        try:
            async with self._place(), asyncio.timeout(self._limits.fetch_s):
                return await self._follow(target, take)
        except TimeoutError:
            raise ImageFetchFailed(
                f"fetching the image from {target.host[:128]} took longer than "
                f"{self._limits.fetch_s:g} s"
            ) from None

    def _place(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, asyncio.Semaphore(self._limits.num_fetches)
        return self._places[1]

    async def _follow(self, target: Target, take: Callable[[int], None]) -> bytes:
        for _ in range(self._limits.redirects + 1):
            try:
                found = await self._get(target, take)
            except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):
                raise ImageFetchFailed(
                    f"the image could not be fetched from {target.host[:128]}"
                ) from None
            if isinstance(found, bytes):
                return found
            target = found
        raise ImageFetchFailed(
            f"the image's URL leads to more than {self._limits.redirects} others"
        )

    async def _get(self, target: Target, take: Callable[[int], None]) -> bytes | Target:
        """The body, or where the server says that it lies."""
        address = await self._address(target)
        request = httpx.Request(
            "GET",
            target.url.copy_with(host=address),
            headers={
                "Host": target.url.netloc.decode("ascii"),
                "Accept": "image/png, image/jpeg, image/webp, image/gif",
                "Accept-Encoding": "identity",
                "User-Agent": "plait",
            },
            extensions={"sni_hostname": target.host, "timeout": self._timeouts()},
        )
        async with self._transport() as transport:
            response = await transport.handle_async_request(request)
            try:
                return await self._read(target, response, take)
            finally:
                await response.aclose()

    async def _read(
        self, target: Target, response: httpx.Response, take: Callable[[int], None]
    ) -> bytes | Target:
        if response.status_code in _REDIRECTS and "location" in response.headers:
            return self._target(str(target.url.join(response.headers["location"])))
        if response.status_code != 200:
            raise ImageFetchFailed(
                f"{target.host[:128]} answered {response.status_code}, not with an image"
            )
        bound = self._limits.image_bytes
        length = response.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > bound:
            raise self._too_large()
        body = bytearray()
        async for chunk in response.aiter_raw():
            take(len(chunk))
            body += chunk
            if len(body) > bound:
                raise self._too_large()
        return bytes(body)

    async def _address(self, target: Target) -> str:
        addresses = await self._resolve(target.host, target.port)
        if not addresses:
            raise ImageFetchFailed(f"{target.host[:128]} has no address")
        if not target.private and not all(is_public(address) for address in addresses):
            raise ImageFetchFailed(
                f"{target.host[:128]} has an address that is not public, so nothing is fetched "
                "from it"
            )
        return addresses[0]

    async def _resolve_by_system(self, host: str, port: int) -> Sequence[str]:
        if self._resolvers is None:
            self._resolvers = ThreadPoolExecutor(_NUM_RESOLVERS, thread_name_prefix="plait-dns")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._resolvers, _addresses, host, port)

    def _target(self, url: str) -> Target:
        return self._allowed.target(url, self._limits.url_chars)

    def _transport(self) -> httpx.AsyncHTTPTransport:
        if self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        # One connection each: the next image's host may have moved.
        return httpx.AsyncHTTPTransport(
            verify=self._tls, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def _timeouts(self) -> dict[str, float | None]:
        return httpx.Timeout(self._limits.fetch_s).as_dict()

    def _too_large(self) -> ImageTooLarge:
        return ImageTooLarge(
            f"the image file is larger than {amount(self._limits.image_bytes)} (--max-image-bytes)"
        )

    def close(self) -> None:
        """End the threads that resolve names."""
        if self._resolvers is not None:
            self._resolvers.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int) -> list[str]:
    """All addresses, IPv4 first: it is dialled the first, and IPv6 often leads nowhere."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return sorted(addresses, key=lambda address: ":" in address)
