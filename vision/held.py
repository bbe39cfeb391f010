"""Bounds what the images of all requests take as the model reads them, until the requests end.

Such an image is up to eight times its pixels. It lies in the engine once, however many requests
have it (`messages.SendImages`), so it is counted once: by content, settings and salt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.vision.budget import ByteBudget


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    num_bytes: int
    users: int = 0


class HeldImages:
    """Images by name, each with how many requests have it. Belongs to one event loop."""

    def __init__(self, num_bytes: int, *, wait_s: float) -> None:
        self.budget = ByteBudget(num_bytes, what="images of requests that run", wait_s=wait_s)
        self._held: dict[str, _Held] = {}

    async def hold(self, wanted: Mapping[str, int]) -> Hold:
        """Count in images of so many bytes. Raises `Overloaded` where no room comes in time.

        It asks for room for all of them at once, and gives back what others have counted already:
        so no two wait for each other.
        """
        reservation = await self.budget.reserve(sum(wanted.values()))
        for name, num_bytes in wanted.items():
            if name in self._held:
                reservation.free(num_bytes)
            held = self._held.setdefault(name, _Held(num_bytes=num_bytes))
            held.users += 1
        return Hold(self, tuple(wanted))

    def let_go(self, name: str) -> None:
        """One request less has it."""
        held = self._held[name]
        held.users -= 1
        if not held.users:
            del self._held[name]
            self.budget.free(held.num_bytes)


class Hold:
    """The images of one request."""

    def __init__(self, images: HeldImages, names: tuple[str, ...]) -> None:
        self._images = images
        self._names = names

    def release(self) -> None:
        """Count them out; once."""
        names, self._names = self._names, ()
        for name in names:
            self._images.let_go(name)
