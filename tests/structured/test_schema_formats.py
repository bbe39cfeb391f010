"""Formats: random strings of their patterns, before judges that know nothing of the patterns."""

import datetime as dt
import ipaddress
import random
import re
import uuid
from email.errors import HeaderParseError
from email.headerregistry import Address
from functools import lru_cache
from urllib.parse import quote

import pytest
from support.schemas import acceptor, compact, schema_spec

from plait.platform.errors import InvalidSchema
from plait.structured.router import route
from plait.structured.schema import derive, formats, regex

# --- random strings ---


def drawn(node, rng):
    """A random string of a language, its borders more often than by chance."""
    if isinstance(node, regex.Chars):
        low, high = rng.choice(node.ranges)
        return chr(rng.choice([low, high, rng.randint(low, high)]))
    if isinstance(node, regex.Seq):
        return "".join(drawn(part, rng) for part in node.parts)
    if isinstance(node, regex.Alt):
        return drawn(rng.choice(node.options), rng)
    high = node.low + 3 if node.high is None else node.high
    count = rng.choice([node.low, high, rng.randint(node.low, high)])
    return "".join(drawn(node.node, rng) for _ in range(count))


@lru_cache
def grammar(name):
    return acceptor(route(schema_spec({"type": "string", "format": name})))


@lru_cache
def members(name):
    """Random strings of a format, as its form has them."""
    form, rng, found = formats.FORMS[name], random.Random(name), {}
    nodes = [regex.search(pattern) for pattern in form.patterns]
    for _ in range(600):
        text = drawn(nodes[0], rng)
        short = form.longest is None or len(text) <= form.longest
        if short and all(derive.matches(node, text) for node in nodes[1:]):
            found[text] = None
    return list(found)


def changed(text, rng):
    """A string with a character more, less, or another."""
    at, char = rng.randrange(len(text) + 1), rng.choice([*"09aZ-.:@/%[]~# é", "xn--", "::", "60"])
    return rng.choice([text[:at] + char + text[at:], text[:at] + text[at + 1 :], text + char])


# --- judges ---


def is_date(text):
    return len(text) == 10 and dt.date.fromisoformat(text)


def is_time(text):
    spelled = re.fullmatch(r"[\d:]{8}(\.\d+)?(z|[+-]\d\d:\d\d)", text, re.ASCII | re.IGNORECASE)
    return bool(spelled) and dt.time.fromisoformat(text.upper()).tzinfo


def is_date_time(text):
    return text[10].upper() == "T" and is_date(text[:10]) and bool(is_time(text[11:]))


def is_duration(text):
    days, _, times = text.removeprefix("P").partition("T")
    letters = ["".join(re.findall("[A-Z]", part)) for part in (days, times)]
    spelled = re.fullmatch(r"P(\d+[YMDW])*(T(\d+[HMS])+)?", text, re.ASCII)
    weeks = letters == ["W", ""]
    parts = letters[0] in "YMD" and letters[1] in "HMS"
    return bool(spelled and any(letters) and (weeks or parts))


def is_hostname(text):
    labels = text.split(".")
    if len(text) > 253 or not text.isascii() or labels[-1].isdigit():
        return False
    for label in labels:
        plain = label.replace("-", "")
        if not plain.isalnum() or len(label) > 63 or "-" in (label[0], label[-1]):
            return False
        if label[2:4] == "--" or label.encode().decode("idna").lower() != label.lower():
            return False
    return True


def is_email(text):
    try:
        address = Address(addr_spec=text)
    except HeaderParseError:
        return False
    host = address.domain
    literal = host.startswith("[") and host.endswith("]") and ipaddress.IPv4Address(host[1:-1])
    plain = text.isascii() and '"' not in text and " " not in text
    sized = len(address.username) <= 64 and len(text) <= 254
    return plain and sized and bool(literal or labelled(host))


def labelled(host):
    return is_hostname(f"{host}.a") if len(host) < 252 else is_hostname(host)


def is_pointer(text):
    steps = text.split("/")
    return not steps[0] and not any(re.search("~(?![01])", step) for step in steps)


def is_relative_pointer(text):
    number = re.match("0|[1-9][0-9]*", text)
    return bool(number) and (text[number.end() :] == "#" or is_pointer(text[number.end() :]))


# RFC 3986, appendix B.
PARTS = re.compile(r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)
CHARS = r"A-Za-z0-9._~!$&'()*+,;=:\-"


def is_reference(text, *, absolute=False):
    scheme, network, path, query, fragment = PARTS.fullmatch(text).groups()

    def has_only(part, more):
        return part is None or re.fullmatch(rf"(?:[{CHARS}{more}]|%[0-9A-Fa-f]{{2}})*", part)

    if scheme is None and (absolute or ":" in path.partition("/")[0]):
        return False
    if scheme is not None and not re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return False
    if network is None and path.startswith("//"):
        return False
    if not (has_only(path, "@/") and has_only(query, "@/?") and has_only(fragment, "@/?")):
        return False
    user, _, host = (network or "").rpartition("@")
    host, _, port = host.rpartition(":") if re.search(r":\d*$", host) else (host, "", "")
    if port and int(port) > 65535:
        return False
    if host.startswith("["):
        return host.endswith("]") and ipaddress.IPv6Address(host[1:-1]) and "%" not in host
    return bool(has_only(user, "") and has_only(host, "") and ":" not in host)


def in_ascii(text):
    """An IRI as a URI."""
    turning = re.search("[\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)
    return " " if turning else re.sub("[\u00a0-\U0002fffd]", lambda found: quote(found[0]), text)


JUDGES = {
    "date": is_date,
    "time": is_time,
    "date-time": is_date_time,
    "duration": is_duration,
    "hostname": is_hostname,
    "email": is_email,
    "ipv4": lambda text: ipaddress.IPv4Address(text).compressed == text,
    "ipv6": lambda text: bool(ipaddress.IPv6Address(text)) and "%" not in text,
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
    "json-pointer": is_pointer,
    "relative-json-pointer": is_relative_pointer,
    "uri": lambda text: is_reference(text, absolute=True),
    "uri-reference": is_reference,
    "iri": lambda text: is_reference(in_ascii(text), absolute=True),
    "iri-reference": lambda text: is_reference(in_ascii(text)),
}


def is_valid(name, text):
    try:
        return bool(JUDGES[name](text))
    except (ValueError, IndexError):
        return False


# --- tests ---


@pytest.mark.parametrize("name", formats.FORMS)
def test_all_strings_of_a_format_are_valid_and_given(name):
    texts = members(name)
    assert len(texts) > 100
    assert [text for text in texts if not is_valid(name, text)] == []
    plain = [text for text in texts if text.isprintable()]
    assert [text for text in plain if not grammar(name).accepts(compact(text))] == []


@pytest.mark.parametrize("name", formats.FORMS)
def test_of_strings_near_a_format_only_valid_ones_are_given(name):
    rng = random.Random(name)
    texts = [changed(text, rng) for text in members(name) for _ in range(4)]
    given = [text for text in texts if grammar(name).accepts(compact(text))]
    assert [text for text in given if not is_valid(name, text)] == []
    assert len(given) < len(texts)


def test_every_day_of_the_calendar_is_a_date_and_no_other():
    (node,) = map(regex.search, formats.FORMS["date"].patterns)
    pattern = re.compile(regex.render(node, python=True))
    years = [f"{year:04}-02-29" for year in range(10000)]
    days = [f"{y}-{m:02}-{d:02}" for y in (2023, 2024) for m in range(14) for d in range(33)]
    for text in years + days:
        assert (pattern.fullmatch(text) is not None) == is_valid("date", text), text


VALID = {
    "date": ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31"],
    "time": ["00:00:00Z", "23:59:59.123456789+23:59", "12:00:00z", "12:00:00-00:00"],
    "date-time": ["2024-02-29T23:59:59Z", "1985-04-12t23:20:50.52z"],
    "duration": ["P4DT12H30M5S", "P1Y", "PT0S", "P2W", "PT36H", "P1M"],
    "hostname": ["a", "www.example.com", "1host", "h0stn4me", "xn-a.b-c.de", f"{'x' * 63}.com"],
    "email": ["joe.bloggs@example.com", "te~st@example.com", "a@[127.0.0.1]", "a@b"],
    "ipv4": ["0.0.0.0", "255.255.255.255"],
    "ipv6": ["::", "::1", "1::8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "::ffff:192.168.0.1"],
    "uuid": ["2EB8AA08-aa98-11ea-b4aa-73b441d16380"],
    "json-pointer": ["", "/", "/a~0b/~1", "/é//0"],
    "relative-json-pointer": ["0", "1/a", "2#"],
    "uri": ["urn:a:b", "http://u:p@[::1]:80/?q#f", "http://a:65535", "mailto:a@b.c", "x:"],
    "uri-reference": ["", "//a/b", "a/b:c", "?q", "#f"],
    "iri": ["http://ü.de/ß?é#ß"],
    "iri-reference": ["ü/é"],
}
INVALID = {
    "date": ["2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31", "2023-1-1", "20230101"],
    "time": ["12:00:60Z", "23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00.Z", "12:00Z"],
    "date-time": ["2023-02-29T00:00:00Z", "1998-12-31T23:59:60Z", "2023-01-01 00:00:00Z"],
    "duration": ["P", "PT", "P1", "P1Y2D", "PT1H5S", "P1W1D", "1D", "P1S"],
    "hostname": [
        "",
        "xn--X",
        "ab--c",
        "-a",
        "a-",
        "a.",
        "1.2.3.4",
        "a_b",
        ".".join(["a" * 60] * 5),
    ],
    "email": [
        "a",
        "@a",
        "a@",
        ".a@b",
        "a..b@c",
        "a@-b",
        "a@xn--X",
        f"{'a' * 65}@b",
        "a@[256.0.0.1]",
    ],
    "ipv4": ["256.0.0.1", "01.2.3.4", "1.2.3", "1.2.3.4.5"],
    "ipv6": ["1::2::3", "12345::", ":1:2", "1:2:3:4:5:6:7:8::", "::1.2.3", "fe80::1%a", ""],
    "uuid": ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa73b441d16380"],
    "json-pointer": ["a", "/~", "/~2"],
    "relative-json-pointer": ["01", "-1", "0##", "/a"],
    "uri": [
        "a",
        "//a",
        "http://[::1",
        "http://a b",
        "http://a:65536",
        ":a",
        "http://a/%zz",
        "1x:a",
    ],
    "uri-reference": ["a b", "1:b", "\\"],
    "iri": ["ü", "http://ü ", "http://a\u202eb"],
    "iri-reference": ["\\ü", "1:ü"],
}


@pytest.mark.parametrize("name", formats.FORMS)
def test_borders_of_a_format(name):
    assert [text for text in VALID[name] if not grammar(name).accepts(compact(text))] == []
    assert [text for text in INVALID[name] if grammar(name).accepts(compact(text))] == []
    assert [text for text in VALID[name] if not is_valid(name, text)] == []
    assert [text for text in INVALID[name] if is_valid(name, text)] == []


def test_formats_can_be_denied_met_and_listed():
    date, stamp = ({"type": "string", "format": name} for name in ("date", "date-time"))
    either = acceptor(route(schema_spec({"oneOf": [date, stamp]})))
    assert either.accepts('"2024-02-29"')
    assert either.accepts('"2024-02-29T12:00:00Z"')
    assert not either.accepts('"2023-02-29"')
    other = acceptor(route(schema_spec({"type": "string", "not": date})))
    assert other.accepts('"2023-02-29"')
    assert not other.accepts('"2024-02-29"')
    listed = acceptor(route(schema_spec({"enum": ["2023-02-29", "2024-02-29"], "format": "date"})))
    assert [listed.accepts(f'"{y}-02-29"') for y in (2023, 2024)] == [False, True]
    several = {"type": "array", "items": date, "uniqueItems": True}
    distinct = acceptor(route(schema_spec(several)))
    assert distinct.accepts('["2024-02-28","2024-02-29"]')
    assert not distinct.accepts('["2024-02-29","2024-02-29"]')
    with pytest.raises(InvalidSchema):
        route(schema_spec(date | {"allOf": [stamp]}))
