"""Where caches that outlive a process are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder(name: str) -> Path:
    """A folder of Plait's in the user's cache; it may not exist yet."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "plait" / name
