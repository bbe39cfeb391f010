from __future__ import annotations
from plait.platform.cli.sources import Resolved
def serve(*, flags: Resolved) -> None:
    """x"""
    print(dict(flags.values), dict(flags.origins))
