"""`plait check MODEL`: can it be served here, and with what?"""
from __future__ import annotations
from plait.platform.cli.sources import Resolved
def check(*, flags: Resolved) -> None:
    """x"""
