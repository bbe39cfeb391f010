"""The text of one sequence, read byte by byte as far as uniqueness needs it.

Two things are vetoed. At a scalar item, each character after which no value that is left could be
reached. At lists and objects, their end where it repeats an earlier item; and in closed objects
already the end of the last value that could make a difference, if it makes none: from there on no
choice might be left. What stood before that value is compared with all earlier items as far as
they go, so that nothing that follows can repeat one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from plait.structured.schema.counting import Language
from plait.structured.schema.regex import Ranges
from plait.structured.unique_table import PLAIN, Item, Row, Table, is_same

_STOP = re.compile(rb'["\\]')
_SPACE = b" \t\r\n"
_BETWEEN, _STRING, _BARE = range(3)
_ESCAPES = {ord(k): ord(v) for k, v in zip('nrbtf\\"/', '\n\r\b\t\f\\"/', strict=True)}
_ESCAPED: Ranges = tuple((point, point) for point in sorted(set(_ESCAPES.values()) - {47}))


class Taken(NamedTuple):
    """The items of a list so far, the last first."""

    item: Item
    before: Taken | None
    count: int


class Frame(NamedTuple):
    """A list or object that is being written."""

    row: Row | None
    is_list: bool
    at: int = -1  # the place of the key, or of the item, that came last
    takes_key: bool = False
    taken: Taken | None = None
    start: int = -1  # where in the text the current item of a unique list begins; -1: none
    settled: bool = False  # that item cannot repeat another any more

    @property
    def can_differ(self) -> bool:
        """Whether what follows the current member can make any difference."""
        if self.row is None:
            return False
        if self.is_list:
            return self.row.endless
        return self.row.open or self.at < self.row.last


class Reader:
    """One place in the text. Copies are cheap."""

    __slots__ = (
        "_begun", "_child", "_frames", "_in_key", "_keys", "_language", "_mode", "_part", "_state",
        "_table", "_text", "_word",
    )  # fmt: skip

    def __init__(self, table: Table) -> None:
        self._table = table
        self._frames: list[Frame] = []
        self._child = table.root  # the state of the value that comes next
        self._mode = _BETWEEN
        self._in_key = False
        self._text = bytearray()  # since the outermost item of a unique list began
        self._word = bytearray()  # the string or other scalar being written
        self._language: Language | None = None  # of that scalar, if it is counted
        self._state = 0
        self._begun = ""  # the characters of a counted string
        self._part = b""  # of its last character
        self._keys: tuple[bytes, ...] | None = None  # which the key being written must be one of

    def copy(self) -> Reader:
        """An independent reader at the same place."""
        other = Reader.__new__(Reader)
        for name in Reader.__slots__:
            setattr(other, name, getattr(self, name))
        other._frames = self._frames.copy()
        other._text = self._text[:]
        other._word = self._word[:]
        return other

    def feed(self, piece: bytes) -> bool:
        """Read on; False where that is vetoed, and the reader is of no use then."""
        at = 0
        while at < len(piece):
            if self._mode == _STRING and self._language is None and self._keys is None:
                found = _STOP.search(piece, at)
                end = found.start() if found and not self._part else at
                end = len(piece) if not found and not self._part else end
                if end > at:
                    self._note(piece[at:end])
                    at = end
                    continue
            if not self._byte(piece[at]):
                return False
            at += 1
        return True

    def _note(self, some: bytes) -> None:
        self._word += some
        self._log(some)

    def _log(self, some: bytes) -> None:
        """Remember what belongs to an item that will be compared."""
        if self._text or self._items():
            self._text += some

    def _items(self) -> bool:
        return any(frame.start >= 0 for frame in self._frames)

    def _byte(self, byte: int) -> bool:
        if self._mode == _STRING:
            return self._string(byte)
        if self._mode == _BARE:
            if byte not in b",]}" and byte not in _SPACE:
                return self._other(byte)
            self._mode = _BETWEEN
            if not self._ended():
                return False
        return self._between(byte)

    def _between(self, byte: int) -> bool:
        if byte in b"]}":
            self._frames.pop()
            self._log(bytes((byte,)))
            return self._ended()
        if byte == 44:  # a comma
            self._log(bytes((byte,)))
            return self._comma()
        if byte in _SPACE or byte == 58:
            self._log(bytes((byte,)))
            return True
        if byte == 34 and self._frames and self._frames[-1].takes_key:
            return self._key()
        return self._value(byte)

    # --- values ---

    def _value(self, byte: int) -> bool:
        """The first byte of a value."""
        parent = self._frames[-1] if self._frames else None
        direct = parent is not None and parent.is_list and parent.row and parent.row.unique
        if parent and direct:
            self._frames[-1] = parent._replace(start=len(self._text), settled=False)
        self._language = None
        if byte in b"[{":
            self._log(bytes((byte,)))
            self._open(is_list=byte == 91)
            return True
        row = parent.row if parent and direct else None
        self._word, self._state, self._begun, self._part = bytearray(), 0, "", b""
        if byte == 34:
            self._mode, self._language = _STRING, row.strings if row else None
            self._note(b'"')
            return True
        self._mode, self._language = _BARE, row.others if row else None
        return self._other(byte)

    def _open(self, *, is_list: bool) -> None:
        row = self._table.row(self._child)
        self._frames.append(Frame(row, is_list, takes_key=not is_list))
        self._child = row.at(0) if row and is_list else PLAIN

    def _comma(self) -> bool:
        frame = self._frames[-1]
        if not frame.is_list:
            self._frames[-1] = frame._replace(takes_key=True)
            return True
        row, at = frame.row, frame.at + 1
        self._child = row.at(at + 1) if row else PLAIN
        self._frames[-1] = frame._replace(at=at)
        size = row.size if row and row.unique else None
        return size is None or frame.taken is None or frame.taken.count < size

    def _ended(self) -> bool:
        """A value has ended: compare it, and all around it that cannot differ any more."""
        if not self._frames:
            return True
        frame = self._frames[-1]
        if frame.start >= 0 and not self._take(frame):
            return False
        return self._settle()

    def _take(self, frame: Frame) -> bool:
        item = Item.read(self._text[frame.start :].decode())
        if self._language is not None and not self._language.accepts(self._state):
            return False
        self._language = None
        if any(item.equals(other) for other in _walk(frame.taken)):
            return False
        count = frame.taken.count if frame.taken else 0
        self._frames[-1] = frame._replace(taken=Taken(item, frame.taken, count + 1), start=-1)
        if not self._items():
            self._text.clear()
        return True

    # --- closed objects ---

    def _settle(self) -> bool:
        """At the last place where an item could differ, it must."""
        for depth, frame in enumerate(self._frames[:-1]):
            if frame.start < 0 or frame.settled:
                continue
            if any(inner.can_differ for inner in self._frames[depth + 1 :]):
                continue
            if self._repeats(depth):
                return False
            self._frames[depth] = frame._replace(settled=True)
        return True

    def _repeats(self, depth: int) -> bool:
        """Whether what there is of an item is the beginning of an earlier one."""
        frame, inner = self._frames[depth], self._frames[depth + 1 :]
        if frame.taken is None:
            return False
        text = self._text[frame.start :].rstrip(_SPACE + b",")
        text += b"".join(b"]" if each.is_list else b"}" for each in reversed(inner))
        item = Item.read(text.decode())
        return any(
            _begins(item.exact, other.exact, inner) or _begins(item.rounded, other.rounded, inner)
            for other in _walk(frame.taken)
        )

    def _key(self) -> bool:
        """The first quote of a key."""
        self._mode, self._in_key, self._language = _STRING, True, None
        self._word = bytearray()
        self._part = b""
        self._keys = self._distinct_keys()
        self._note(b'"')
        return True

    def _distinct_keys(self) -> tuple[bytes, ...] | None:
        """The keys after which an item can still differ, if that is what it must."""
        frame = self._frames[-1]
        if frame.row is None or frame.row.open or not frame.at < frame.row.last:
            return None
        for depth, outer in enumerate(self._frames[:-1]):
            if outer.start < 0 or outer.settled:
                continue
            if any(inner.can_differ for inner in self._frames[depth + 1 : -1]):
                continue
            if self._repeats(depth):
                left = frame.row.order[frame.at + 1 : frame.row.last + 1]
                return tuple(json.dumps(name, ensure_ascii=False).encode() for name in left)
        return None

    def _key_ended(self) -> bool:
        self._in_key, self._keys = False, None
        frame = self._frames[-1]
        if frame.row is None:
            self._child = PLAIN
            self._frames[-1] = frame._replace(takes_key=False)
            return True
        key = json.loads(self._word.decode())
        self._child = frame.row.under(key)
        self._frames[-1] = frame._replace(takes_key=False, at=frame.row.place(key))
        return True

    # --- scalars ---

    def _string(self, byte: int) -> bool:
        self._note(bytes((byte,)))
        if self._keys is not None and not any(k.startswith(self._word) for k in self._keys):
            return False
        if byte == 34 and not self._part:
            self._mode = _BETWEEN
            return self._key_ended() if self._in_key else self._ended()
        self._part += bytes((byte,))
        point = _point(self._part)
        if point is None:
            return self._language is None or self._is_left(_points(self._part))
        self._part = b""
        if self._language is None:
            return True
        self._begun += chr(point)
        self._state = self._language.step(self._state, point)
        return self._state >= 0 and self._is_left(None)

    def _other(self, byte: int) -> bool:
        self._note(bytes((byte,)))
        if self._language is None:
            return True
        self._begun += chr(byte)
        self._state = self._language.step(self._state, byte)
        return self._state >= 0 and self._is_left(None)

    def _is_left(self, first: Ranges | None) -> bool:
        """Whether a value that is not taken can still be reached."""
        assert self._language is not None, "asked of counted scalars only"
        left = self._language.num_left(self._state, first)
        if left == float("inf"):
            return True
        taken = self._frames[-1].taken
        quoted = self._mode == _STRING
        similar = sum(
            isinstance(other.exact, str) == quoted
            and other.text.startswith(self._begun)
            and (first is None or _goes_on(other.text, self._begun, first))
            for other in _walk(taken)
        )
        return similar < left


def _goes_on(text: str, begun: str, first: Ranges) -> bool:
    following = text[len(begun) : len(begun) + 1]
    return bool(following) and any(low <= ord(following) <= high for low, high in first)


def _walk(taken: Taken | None) -> Iterator[Item]:
    while taken is not None:
        yield taken.item
        taken = taken.before


def _begins(part: Any, whole: Any, frames: list[Frame]) -> bool:
    """Whether a value that is being written, inside of these frames, may become the other one."""
    if not frames:
        return is_same(part, whole)
    frame, inner = frames[0], frames[1:]
    if frame.is_list:
        if not isinstance(whole, list) or len(whole) < len(part):
            return False
        pairs = list(zip(part, whole, strict=False))
    else:
        if not isinstance(whole, dict) or not part.keys() <= whole.keys():
            return False
        order = frame.row.order[: frame.at + 1] if frame.row else ()
        if any(key in whole and key not in part for key in order):
            return False
        pairs = [(part[key], whole[key]) for key in part]
    *before, last = pairs or [(None, None)]
    return all(is_same(one, other) for one, other in before) and _begins(*last, inner)


def _point(part: bytes) -> int | None:
    """The character of these bytes of a JSON string; None where bytes are missing."""
    if part[0] == 92:
        if len(part) == 1 or (part[1] == 117 and len(part) < 6):
            return None
        return int(part[2:].decode(), 16) if part[1] == 117 else _ESCAPES.get(part[1], 0xFFFD)
    if len(part) < _width(part[0]):
        return None
    return ord(part.decode(errors="replace")[0])


def _width(lead: int) -> int:
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _points(part: bytes) -> Ranges:
    """The characters that may become of a character's first bytes."""
    if part[0] == 92:
        return _ESCAPED
    missing = _width(part[0]) - len(part)
    bits = part[0] & (0xFF >> (_width(part[0]) + 1))
    for byte in part[1:]:
        bits = bits << 6 | byte & 0x3F
    low, high = bits << 6 * missing, ((bits + 1) << 6 * missing) - 1
    least = {2: 0x80, 3: 0x800, 4: 0x10000}[_width(part[0])]
    return ((max(low, least), min(high, 0x10FFFF)),)
