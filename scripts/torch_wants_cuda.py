"""Exits with 0 if the installed torch is a build that needs the CUDA libraries' packages."""

import importlib.metadata
import sys

wanted = importlib.metadata.requires("torch") or []
sys.exit(not any(name.startswith(("nvidia-", "cuda-", "triton")) for name in wanted))
