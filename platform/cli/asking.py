"""Opens whoever answers `plait chat` and `plait complete`, by their flags."""

from __future__ import annotations

from plait.platform.cli.answering import Answerer
from plait.platform.cli.asking_flags import ANSWER, Asking
from plait.platform.cli.settings import engine_options
from plait.platform.cli.sources import Resolved
from plait.platform.core import InvalidParameter, SamplingParams
from plait.platform.errors import ConfigError

_NOT_SAMPLING = ("url", "api_key", "adapter")
# Flags that say something to a server as well.
_WITH_URL = frozenset({"model", "system"}) | {flag.key for flag in ANSWER}


def sampling_params(flags: Resolved) -> SamplingParams:
    """How answers are to be chosen."""
    asking = flags.build(Asking)
    names = [flag.field for flag in ANSWER if flag.field not in _NOT_SAMPLING]
    try:
        return SamplingParams(**{name: getattr(asking, name) for name in names})
    except InvalidParameter as error:
        raise ConfigError(str(error), param=error.param) from None


def open_answerer(flags: Resolved, model: str | None = None) -> Answerer:
    """A server where there is a --url, else an engine in this process.

    `model` is MODEL where the command takes it as an option of its own.
    """
    model = model if model is not None else flags.values.get("model")
    url, api_key = flags["url"], flags["api_key"]
    if url is None:
        if api_key is not None and flags.origin("api_key").startswith("--"):
            raise ConfigError("--api-key is for a server: give its --url too, or drop it")
        from plait.platform.cli.local import LocalAnswerer

        return LocalAnswerer(engine_options(flags, model=model), adapter=flags["adapter"])
    for key, origin in flags.origins.items():
        # Variables and files may serve other commands; a flag typed here means something.
        if key not in _WITH_URL and origin.startswith("--"):
            raise ConfigError(
                f"{origin} has no effect with --url: the server has its own", param=key
            )
    from plait.platform.cli.remote import RemoteAnswerer

    return RemoteAnswerer(url, model=model, api_key=api_key, adapter=flags["adapter"])
