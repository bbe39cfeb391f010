"""Fetching: allowed hosts alone, public addresses alone, within bounds."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from support.images import encoded, picture

from plait.platform.errors import ImageFetchFailed, ImageTooLarge
from plait.vision.fetch import Fetcher
from plait.vision.hosts import AllowList, MediaHost, is_public
from plait.vision.limits import ImageLimits

PNG = encoded(picture())
LIMITS = ImageLimits()


@pytest.fixture
def anyio_backend():
    return "asyncio"


pytestmark = pytest.mark.anyio


class Web:
    """A server on this machine; `pages` maps a path to the bytes of its whole response."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []  # path, Host header
        self.port = 0
        self.hold = asyncio.Event()  # responses to /slow wait for it

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:  # whoever connected gave up
            writer.close()
            return
        path = head.split(" ")[1]
        host = next(x[6:] for x in head.split("\r\n") if x.lower().startswith("host: "))
        self.asked.append((path, host))
        with contextlib.suppress(ConnectionError):
            if path == "/slow":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                await writer.drain()
                await self.hold.wait()
            writer.write(self.pages.get(path, response(b"", "404 Not Found")))
            await writer.drain()
        writer.close()


def response(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    headers = {"content-length": str(len(body)), "content-type": "text/html", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def redirect(to: str) -> bytes:
    return response(b"", "302 Found", location=to)


@pytest.fixture
async def web():
    made = Web()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    made.hold.set()
    server.close()


def resolver(**names: list[str]) -> Callable:
    """Each name's addresses, by its first label; each look-up takes the next of `|`-joined."""
    left = {name: list(turns) for name, turns in names.items()}

    async def resolve(host: str, port: int) -> list[str]:
        turns = left.get(host.partition(".")[0], [host])
        return (turns.pop(0) if len(turns) > 1 else turns[0]).split(",")

    return resolve


def fetcher(web: Web, limits: ImageLimits = LIMITS, *, entries=(), **names: list[str]) -> Fetcher:
    default = (f"private+http://media.test:{web.port}",)
    names = {"media": ["127.0.0.1"], **names}
    return Fetcher(limits, AllowList.parse(entries or default), resolve=resolver(**names))


async def fetched(using: Fetcher, url: str) -> bytes:
    return await using.fetch(url, lambda _: None)


async def test_an_allowed_host_is_asked_under_its_name(web):
    web.pages["/a.png?q=1"] = response(PNG)
    assert await fetched(fetcher(web), f"http://media.test:{web.port}/a.png?q=1#part") == PNG
    assert web.asked == [("/a.png?q=1", f"media.test:{web.port}")]


async def test_nothing_is_fetched_by_default(web):
    with pytest.raises(ImageFetchFailed, match="--allow-media-url"):
        await fetched(Fetcher(LIMITS, AllowList()), f"http://127.0.0.1:{web.port}/a.png")
    assert web.asked == []


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0177.0.0.1/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[2002:7f00:1::]/",
        "http://[fe80::1]/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/",
        "http://0.0.0.0/",
        "http://224.0.0.1/",
        "http://100.64.0.1/",
        "http://metadata.internal/",
        "http://mixed.test/",
    ],
)
async def test_no_address_of_this_network_is_dialled_even_where_all_hosts_are_allowed(url):
    async def resolve(host: str, port: int) -> list[str]:
        named = {
            "metadata.internal": ["169.254.169.254"],
            "mixed.test": ["93.184.216.34", "127.0.0.1"],
        }
        if host in named:
            return named[host]
        return list(await Fetcher(LIMITS, AllowList())._resolve_by_system(host, port))

    using = Fetcher(LIMITS, AllowList.parse(["http://*"]), resolve=resolve)
    with pytest.raises(ImageFetchFailed, match=r"not public|could not be fetched|cannot be read"):
        await fetched(using, url)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://media.test@evil.test/", "user name"),
        ("http://user:word@media.test/", "user name"),
        ("http://media.test\\@evil.test/", "backslash"),
        ("http://media.test /", "space"),
        ("http://media.test/\r\nX: y", "control"),
        ("http://media.test:22/", "not fetched from"),
        ("https://media.test/", "not fetched from"),
        ("http://media.test.evil.test/", "not fetched from"),
        ("http://evilmedia.test/", "not fetched from"),
        ("http://media.test./", "not fetched from"),
        ("http:///a.png", "begins with"),
        ("http://media.test:99999999/", "cannot be read|not fetched from"),
        ("http://media.test/" + "a" * 9000, "longer"),
    ],
)
async def test_urls_that_pretend_are_refused(url, match):
    using = Fetcher(LIMITS, AllowList.parse(["http://media.test"]), resolve=resolver())
    with pytest.raises(ImageFetchFailed, match=match):
        await fetched(using, url)


async def test_a_name_that_changes_its_mind_is_dialled_where_it_was_checked(web):
    web.pages["/a.png"] = response(PNG)
    # The first look-up is checked and dialled; were there a second, it would lead elsewhere.
    using = fetcher(web, media=["127.0.0.1", "203.0.113.1"])
    assert await fetched(using, f"http://media.test:{web.port}/a.png") == PNG
    changed = Fetcher(
        LIMITS,
        AllowList.parse([f"http://media.test:{web.port}"]),
        resolve=resolver(media=["127.0.0.1", "93.184.216.34"]),
    )
    with pytest.raises(ImageFetchFailed, match="not public"):
        await fetched(changed, f"http://media.test:{web.port}/a.png")
    assert len(web.asked) == 1


async def test_redirects_are_checked_like_the_first_address(web):
    at = f"http://media.test:{web.port}"
    inside = f"http://inside.test:{web.port}"
    web.pages |= {
        "/ok": redirect("/a.png"),
        "/a.png": response(PNG),
        "/loop": redirect("/loop"),
        "/unlisted": redirect(f"http://evil.test:{web.port}/a.png"),
        "/inside": redirect(f"{inside}/a.png"),
        "/metadata": redirect("http://169.254.169.254/latest"),
        "/file": redirect("file:///etc/passwd"),
        "/user": redirect(f"http://x@media.test:{web.port}/a.png"),
    }
    entries = (f"private+http://media.test:{web.port}", f"http://inside.test:{web.port}")
    using = fetcher(web, entries=entries, inside=["127.0.0.1"])
    assert await fetched(using, f"{at}/ok") == PNG
    assert len(web.asked) == 2
    for path, match in (
        ("/unlisted", "not fetched from"),
        ("/inside", "not public"),
        ("/metadata", "not fetched from"),
        ("/file", "begins with"),
        ("/user", "user name"),
    ):
        web.asked.clear()
        with pytest.raises(ImageFetchFailed, match=match):
            await fetched(using, at + path)
        assert [asked for asked, _ in web.asked] == [path]
    web.asked.clear()
    with pytest.raises(ImageFetchFailed, match="more than 3"):
        await fetched(using, f"{at}/loop")
    assert len(web.asked) == 4


async def test_bytes_are_bounded_whatever_the_server_says_of_them(web):
    limits = ImageLimits(image_bytes=1000)
    web.pages |= {
        "/honest": response(b"x" * 1001),
        "/liar": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000,
        "/fits": response(b"x" * 1000),
    }
    at = f"http://media.test:{web.port}"
    for path in ("/honest", "/liar"):
        with pytest.raises(ImageTooLarge, match="1000 bytes"):
            await fetched(fetcher(web, limits), at + path)
    assert await fetched(fetcher(web, limits), at + "/fits") == b"x" * 1000


async def test_a_slow_server_is_left_at_the_deadline(web):
    using = fetcher(web, ImageLimits(fetch_s=0.05))
    with pytest.raises(ImageFetchFailed, match=r"longer than 0\.05 s"):
        await fetched(using, f"http://media.test:{web.port}/slow")


async def test_a_slow_resolver_is_left_at_the_deadline():
    async def resolve(host: str, port: int) -> list[str]:
        return await asyncio.Future()

    using = Fetcher(ImageLimits(fetch_s=0.05), AllowList.parse(["media.test"]), resolve=resolve)
    with pytest.raises(ImageFetchFailed, match="longer"):
        await fetched(using, "https://media.test/a.png")


async def test_errors_of_the_other_side_are_told_without_addresses(web):
    at = f"http://media.test:{web.port}"
    web.pages["/broken"] = b"SSH-2.0-x\r\n\r\n"
    with pytest.raises(ImageFetchFailed, match="answered 404"):
        await fetched(fetcher(web), f"{at}/none")
    for using, url in ((fetcher(web), f"{at}/broken"), (fetcher(web, media=["127.0.0.2"]), at)):
        with pytest.raises(ImageFetchFailed, match="could not be fetched") as error:
            await fetched(using, url)
        assert "127.0.0" not in error.value.message


@pytest.mark.parametrize(
    ("entry", "url", "allowed"),
    [
        ("example.com", "https://example.com/a", True),
        ("example.com", "https://EXAMPLE.com:443/a", True),
        ("example.com", "http://example.com/a", False),
        ("example.com", "https://a.example.com/a", False),
        ("*.example.com", "https://a.b.example.com/a", True),
        ("*.example.com", "https://example.com/a", False),
        ("example.com:8443", "https://example.com:8443/a", True),
        ("example.com:8443", "https://example.com/a", False),
        ("http://example.com", "http://example.com/a", True),
        ("*", "https://anything.test/a", True),
        ("*", "https://anything.test:8443/a", False),
        ("[2001:db8::1]", "https://[2001:db8::1]/a", True),
    ],
)
async def test_entries_of_the_list_mean_just_what_they_say(entry, url, allowed):
    hosts = AllowList.parse([entry])
    if allowed:
        assert hosts.target(url, 8192).private is False
    else:
        with pytest.raises(ImageFetchFailed, match="not fetched from"):
            hosts.target(url, 8192)


@pytest.mark.parametrize(
    "entry",
    ["", "a b", "ftp://host", "host:0x1", "host:99999", "a.*", "*.*", "user@host", "h/path"],
)
async def test_entries_that_mean_nothing_are_refused(entry):
    with pytest.raises(ValueError, match="write HOST"):
        MediaHost.parse(entry)


async def test_public_addresses_are_told_from_others():
    assert all(map(is_public, ["93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8"]))
    others = ["", "no", "127.0.0.1", "192.0.0.8", "240.0.0.1", "255.255.255.255"]
    others += ["::", "::127.0.0.1", "::ffff:0:7f00:1", "64:ff9b:1::7f00:1", "fec0::1", "fc00::1"]
    others += ["ff0e::1", "fe80::1%eth0", "2001:0:4136:e378:8000:63bf:80ff:fffe"]
    assert [address for address in others if is_public(address)] == []
    assert is_public("64:ff9b::8.8.8.8")
