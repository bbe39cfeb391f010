"""Images of all requests share one bound, and each counts once."""

from __future__ import annotations

import asyncio

import pytest

from plait.platform.errors import Overloaded
from plait.vision.held import HeldImages

pytestmark = pytest.mark.anyio


async def test_an_image_of_several_requests_counts_once_until_the_last_has_ended() -> None:
    held = HeldImages(100, wait_s=0.01)
    first = await held.hold({"a": 30, "b": 20})
    second = await held.hold({"a": 30})
    assert held.budget.used == 50
    first.release()
    first.release()
    assert held.budget.used == 30
    second.release()
    assert held.budget.used == 0


async def test_who_finds_no_room_waits_for_it_and_is_refused_in_the_end() -> None:
    held = HeldImages(100, wait_s=0.01)
    first = await held.hold({"a": 90})
    with pytest.raises(Overloaded, match="images of requests that run"):
        await held.hold({"b": 20})
    assert held.budget.used == 90
    patient = HeldImages(100, wait_s=30)
    first = await patient.hold({"a": 90})
    waiting = asyncio.create_task(patient.hold({"b": 20}))
    cancelled = asyncio.create_task(patient.hold({"c": 95}))
    await asyncio.sleep(0)
    cancelled.cancel()
    first.release()
    second = await waiting
    assert patient.budget.used == 20
    second.release()
    assert patient.budget.used == 0
