"""Loading a model, or only checking whether it could be: the two entries of this package.

Neither imports transformers before it is needed: a model that was started before, with the same
bytes, options and code, needs nothing of it.
"""

from __future__ import annotations

from plait.platform.config import Options
from plait.platform.model.loaded import LoadedModel, SupportReport
from plait.platform.model.locating import locate
from plait.platform.model.warm_start import warm_start
from plait.platform.model.wishes import check_options
from plait.platform.starting.light_imports import import_transformers


def load_model(options: Options) -> LoadedModel:
    """Load `options.model`.

    Raises `ConfigError` where a flag cannot hold, `ModelUnsupported` where the model cannot be
    served or its checkpoint is not whole.
    """
    check_options(options)
    located = locate(options)
    loaded = warm_start(options, located)
    if loaded is not None:
        return loaded
    import_transformers()
    from plait.platform.model.load import load_fresh

    return load_fresh(options, located)


def check_model(options: Options) -> SupportReport:
    """Say whether `options.model` can be served, from its config and headers alone."""
    import_transformers()
    from plait.platform.model.load import check

    return check(options)
