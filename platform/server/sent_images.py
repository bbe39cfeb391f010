"""Which images an engine process has, so that each of them crosses to it once.

A request's images may take many megabytes, and requests that run together often have the same. The
server keeps count of who needs which; the engine keeps what it was sent until it is told to forget.
Images are the same where content and salt are: what others have sent must not make anyone faster.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from plait.platform.core import Request
from plait.platform.messages import Add, SendImages, image_name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lent:
    """The images that one request needs of an engine, until they are given back."""

    names: frozenset[str]
    life: int  # of which engine


class SentImages:
    """Counts for one engine after the other. Belongs to the event loop."""

    def __init__(self) -> None:
        self._users: Counter[str] = Counter()
        self._life = 0

    def lend(
        self, request: Request, timeout_s: float | None
    ) -> tuple[Lent, list[SendImages | Add]]:
        """Count a request in; what is to be sent for it.

        The first message comes before any of a request that is lent to later.
        """
        tensors = {image_name(request, item): item.tensors for item in request.images}
        new = {name: made for name, made in tensors.items() if name not in self._users}
        self._users.update(tensors.keys())
        bare = tuple(replace(item, tensors={}) for item in request.images)
        add = Add(request=replace(request, images=bare), timeout_s=timeout_s)
        lent = Lent(names=frozenset(tensors), life=self._life)
        return lent, [SendImages(images=new), add] if new else [add]

    def give_back(self, lent: Lent) -> tuple[str, ...]:
        """Count it out; the images that nobody needs any more."""
        if lent.life != self._life:  # that engine has ended
            return ()
        self._users.subtract(lent.names)
        gone = tuple(name for name in lent.names if not self._users[name])
        for name in gone:
            del self._users[name]
        return gone

    def renew(self) -> None:
        """Begin with an engine that has none."""
        self._users.clear()
        self._life += 1
