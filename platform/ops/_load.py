"""Loads the C++ library, after which its ops stand under ``torch.ops.plait``."""

import functools
from pathlib import Path

import torch

import plait


@functools.cache
def load_library() -> Path:
    """Loads ``plait/_C.so`` into the process, once, and returns where it lies.

    The library is installed beside the package's ``__init__``, in a wheel and in an editable
    install alike.

    Raises:
        ImportError: The library is not there, or it does not fit the installed torch.
    """
    path = Path(str(plait.__file__)).with_name("_C.so")
    if not path.exists():
        raise ImportError(f"{path} is missing: build it with `make build`")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"{path} does not fit torch {torch.__version__}: rebuild it with `make build`"
        ) from error
    return path
