"""The text of one sequence, read byte by byte as far as uniqueness needs it.

Two things are vetoed. At a scalar item, each character after which no value that is left could be
reached. At lists and objects, their end where it repeats an earlier item; and in closed objects
already the end of the last value that could make a difference, if it makes none: from there on no
choice might be left. What stood before that value is compared with all earlier items as far as
they go, so that nothing that follows can repeat one.
"""

from __future__ import annotations

import json
import math
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
    number: int  # of items


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
        "_begun", "_child", "_frames", "_in_key", "_keys", "_language", "_mode", "_part", "_rivals",
        "_state", "_table", "_text", "_word",
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
        self._rivals: tuple[Item, ...] | None = None  # what it must not become; None: the items
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
        if byte in b"]}," and not self._frames:
            return False  # which no grammar allows either
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
        self._rivals = None
        if parent and not direct and (rivals := self._counterparts()):
            row, self._rivals = parent.row, rivals
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
        return size is None or frame.taken is None or frame.taken.number < size

    def _ended(self) -> bool:
        """A value has ended: compare it, and all around it that cannot differ any more."""
        if self._language is not None and not self._language.accepts(self._state):
            return False
        self._language = None
        if not self._frames:
            return True
        frame = self._frames[-1]
        if frame.start >= 0 and not self._take(frame):
            return False
        return self._settle()

    def _take(self, frame: Frame) -> bool:
        item = Item.read(self._text[frame.start :].decode())
        if any(item.equals(other) for other in _walk(frame.taken)):
            return False
        count = frame.taken.number if frame.taken else 0
        self._frames[-1] = frame._replace(taken=Taken(item, frame.taken, count + 1), start=-1)
        if not self._items():
            self._text.clear()
        return True

    # --- closed objects ---

    def _settle(self) -> bool:
        """At the last place where an item could differ, it must."""
        for depth in self._undecided(len(self._frames)):
            if self._repeats(depth):
                return False
            self._frames[depth] = self._frames[depth]._replace(settled=True)
        return True

    def _undecided(self, end: int) -> Iterator[int]:
        """Lists whose current item may repeat another, and can differ by nothing that follows.

        What follows in the frames from `end` on does not count.
        """
        for depth, frame in enumerate(self._frames[:-1]):
            inner = self._frames[depth + 1 : end]
            if frame.start >= 0 and not frame.settled and not any(f.can_differ for f in inner):
                yield depth

    def _places(self, depth: int, rest: bytes = b"") -> Iterator[tuple[Any, Any]]:
        """What is written last of an item, and what stands there in earlier ones like it.

        `rest` stands for what is not yet written.
        """
        frame, inner = self._frames[depth], self._frames[depth + 1 :]
        if frame.taken is None:
            return
        text = self._text[frame.start :].rstrip(_SPACE + b",") + rest
        text += b"".join(b"]" if each.is_list else b"}" for each in reversed(inner))
        item = Item.read(text.decode())
        for other in _walk(frame.taken):
            exact = _place(item.exact, other.exact, inner)
            found = exact or _place(item.rounded, other.rounded, inner)
            if found is not None:
                yield found

    def _repeats(self, depth: int) -> bool:
        """Whether what there is of an item is the beginning of an earlier one."""
        return any(is_same(part, whole) for part, whole in self._places(depth))

    def _counterparts(self) -> tuple[Item, ...]:
        """What a scalar must not become, for its item would become like another."""
        frame = self._frames[-1]
        if frame.row is None or frame.is_list or frame.at != frame.row.last or frame.row.open:
            return ()
        return tuple(
            Item.of(whole)
            for depth in self._undecided(len(self._frames))
            for _, whole in self._places(depth, b"null")
            if not isinstance(whole, dict | list)
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
        left = frame.row.order[frame.at + 1 : frame.row.last + 1]
        for depth in self._undecided(len(self._frames) - 1):
            if self._repeats(depth):
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
        if left == math.inf:
            return True
        quoted = self._mode == _STRING
        if not quoted and "." in self._begun:
            left = (9 * left + 1) // 10  # with idle zeros a value has many texts
        others = _walk(self._frames[-1].taken) if self._rivals is None else self._rivals
        similar = sum(
            isinstance(other.exact, str) == quoted
            and _begins(other.text, self._begun, quoted=quoted)
            and (first is None or _goes_on(other.text, self._begun, first))
            for other in others
        )
        return similar < left


def _begins(text: str, begun: str, *, quoted: bool) -> bool:
    """Whether a value may be spelled with such a beginning."""
    if quoted or "." not in begun:
        return text.startswith(begun)
    padded = f"{text}{'' if '.' in text else '.'}{'0' * len(begun)}"
    return padded.startswith(begun) or (text == "0" and not begun.strip("-0."))


def _goes_on(text: str, begun: str, first: Ranges) -> bool:
    following = text[len(begun) : len(begun) + 1]
    return bool(following) and any(low <= ord(following) <= high for low, high in first)


def _walk(taken: Taken | None) -> Iterator[Item]:
    while taken is not None:
        yield taken.item
        taken = taken.before


def _place(part: Any, whole: Any, frames: list[Frame]) -> tuple[Any, Any] | None:
    """The last member, inside of these frames, with its counterpart in another value.

    None where the two differ before.
    """
    for frame in frames:
        pairs = _pairs(part, whole, frame)
        if pairs is None or not all(is_same(one, other) for one, other in pairs[:-1]):
            return None
        part, whole = pairs[-1] if pairs else (None, None)
    return part, whole


def _pairs(part: Any, whole: Any, frame: Frame) -> list[tuple[Any, Any]] | None:
    """The members of a list or object that is being written, with those of another."""
    if frame.is_list:
        fits = isinstance(whole, list) and len(whole) >= len(part)
        return list(zip(part, whole, strict=False)) if fits else None
    if not isinstance(whole, dict) or not part.keys() <= whole.keys():
        return None
    order = frame.row.order[: frame.at + 1] if frame.row else ()
    if any(key in whole and key not in part for key in order):
        return None
    return [(part[key], whole[key]) for key in part]


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
