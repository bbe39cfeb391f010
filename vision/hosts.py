"""Which hosts images are fetched from, and which addresses these may have."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

import httpx

from plait.platform.errors import ImageFetchFailed

_PORTS = {"https": 443, "http": 80}
_PRIVATE = "private+"
_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")
# Networks whose addresses carry one of IPv4 inside, which is where a packet ends up.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# What has been given out for the open Internet. `is_global` knows what is not, which leaves out
# some: site-local addresses, those compatible with IPv4, translations of a network's own.
_UNICAST = ipaddress.IPv6Network("2000::/3")
_PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")
_NOT_IN_URL = re.compile(r"[\x00-\x20\x7f-\x9f\\]")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaHost:
    """One entry of the allow-list: `[private+][http://]HOST[:PORT]`, HOST or `*.HOST` or `*`.

    https only, unless the entry says `http://`, which then is the only scheme. The port is the
    scheme's own unless given. `private+` lets the host have addresses that are not public.
    """

    scheme: str
    host: str  # lower case; an address stands without brackets
    port: int
    private: bool = False

    @classmethod
    def parse(cls, text: str) -> MediaHost:
        """Raises `ValueError` that says what is wanted."""
        wanted = f"{text!r} is no host: write HOST, *.HOST or HOST:PORT, such as images.example.com"
        rest = text.strip().lower()
        private, rest = rest.startswith(_PRIVATE), rest.removeprefix(_PRIVATE)
        scheme, separator, authority = rest.rpartition("://")
        scheme = scheme if separator else "https"
        host, port = _split_port(authority)
        if scheme not in _PORTS or not 0 < (port or 1) < 65536:
            raise ValueError(wanted)
        name = host.removeprefix("*.")
        if host != "*" and not (_HOST.fullmatch(name) or (host == name and _address(host))):
            raise ValueError(wanted)
        return cls(scheme=scheme, host=host, port=port or _PORTS[scheme], private=private)

    def covers(self, scheme: str, host: str, port: int) -> bool:
        """Whether a URL's host is this entry's."""
        if (scheme, port) != (self.scheme, self.port):
            return False
        if self.host == "*":
            return True
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return host == self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An address on the web that may be asked."""

    url: httpx.URL
    host: str
    port: int
    private: bool  # whether the entry lets it have addresses that are not public


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowList:
    """The hosts that images may be fetched from; none by default."""

    hosts: tuple[MediaHost, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AllowList:
        """Raises `ValueError`."""
        return cls(hosts=tuple(MediaHost.parse(entry) for entry in entries))

    def target(self, url: str, max_chars: int) -> Target:
        """Where a URL leads, if that is allowed. Raises `ImageFetchFailed`.

        One parser reads the URL, and what is dialled is made of its result.
        """
        if not self.hosts:
            raise ImageFetchFailed(
                "images are not fetched from the web here: send a data: URL "
                "(the server's --allow-media-url names hosts to fetch from)"
            )
        parsed = _parse(url, max_chars)
        # As it is dialled: names beyond ASCII in their encoded form.
        host, scheme = parsed.raw_host.decode("ascii").lower().strip("[]"), parsed.scheme
        port = parsed.port or _PORTS[scheme]
        for entry in self.hosts:
            if entry.covers(scheme, host, port):
                return Target(url=parsed, host=host, port=port, private=entry.private)
        where = f"{scheme}://{host}" + ("" if port == _PORTS[scheme] else f":{port}")
        raise ImageFetchFailed(
            f"images are not fetched from {where[:128]}: it is not among the server's "
            "--allow-media-url"
        )


def is_public(address: str) -> bool:
    """Whether an address belongs to the open Internet, wherever a packet to it may be led on."""
    found = _address(address)
    if found is None:
        return False
    inner = _inner(found)
    if inner is not None:
        return is_public(str(inner))
    if isinstance(found, ipaddress.IPv6Address):
        return found.is_global and found in _UNICAST
    return found.is_global and not (found.is_multicast or found.is_reserved or found in _PROTOCOLS)


def _inner(address: Address) -> Address | None:
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


def _parse(url: str, max_chars: int) -> httpx.URL:
    if len(url) > max_chars:
        raise ImageFetchFailed(f"the image's URL is longer than {max_chars} characters")
    if _NOT_IN_URL.search(url):
        raise ImageFetchFailed("the image's URL has a backslash, a space or a control character")
    try:
        parsed = httpx.URL(url).copy_with(fragment=None)
    except (httpx.InvalidURL, ValueError):
        raise ImageFetchFailed("the image's URL cannot be read") from None
    if parsed.scheme not in _PORTS or not parsed.raw_host:
        raise ImageFetchFailed("an image's URL begins with data:, or with https:// and a host")
    if parsed.userinfo or "@" in parsed.netloc.decode("ascii", "replace"):
        raise ImageFetchFailed("the image's URL holds a user name or password: leave it out")
    return parsed


def _split_port(authority: str) -> tuple[str, int | None]:
    if authority.startswith("["):
        host, _, port = authority[1:].partition("]")
        separator, port = port[:1], port[1:]
    elif authority.count(":") > 1:  # an IPv6 address without brackets
        return authority, None
    else:
        host, separator, port = authority.partition(":")
    if not separator:
        return host, None
    return host, int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
