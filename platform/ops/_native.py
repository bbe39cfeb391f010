"""Whether the C++ library is at hand. Without it every op runs its torch reference."""

import functools
import logging

from plait.platform.ops._load import load_library


@functools.cache
def has_kernels() -> bool:
    """Loads the C++ library, once, and tells whether its ops can be called."""
    try:
        load_library()
    except ImportError as error:
        logging.getLogger(__name__).warning("CPU kernels are off, which is slow: %s", error)
        return False
    return True
