"""From resolved flags to `Options` and `ServerSettings`; what must not be combined."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

from plait.platform.cli.sources import Resolved
from plait.platform.config import Options
from plait.platform.errors import ConfigError
from plait.platform.server.settings import Limits, ServerSettings


def engine_options(flags: Resolved, **extra: object) -> Options:
    """What the engine is asked for; `extra` goes before the flags."""
    options = flags.build(Options, **extra)
    if options.revision and (options.model is None or Path(options.model).exists()):
        raise ConfigError(
            f"{flags.origin('revision')} names a version of a Hugging Face id, but the model "
            "is a file or directory: drop it",
            param="revision",
        )
    if flags.given("kv_cache_memory") and flags.given("memory_utilization"):
        raise ConfigError(
            f"{flags.origin('kv_cache_memory')} and {flags.origin('memory_utilization')} both "
            "decide the memory for KV: keep one",
            param="kv-cache-memory",
        )
    return options


def set_environment(flags: Resolved) -> None:
    """Set what libraries and the engine process read from the environment.

    Must come before any of them is imported: huggingface_hub looks only then.
    """
    if flags.values.get("offline"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    if flags.values.get("cpu_isa"):
        os.environ["PLAIT_CPU_ISA"] = flags["cpu_isa"]
    if flags.values.get("log_level"):
        os.environ["PLAIT_LOG_LEVEL"] = flags["log_level"]


def server_settings(flags: Resolved) -> ServerSettings:
    """What the HTTP server is asked for. Refuses to listen publicly without a key."""
    keys = (*flags["api_key"], *_keys_of_file(flags["api_key_file"]))
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key is empty", param="api-key")
    if flags.given("uds"):
        for other in ("host", "port"):
            if flags.given(other):
                raise ConfigError(
                    f"{flags.origin('uds')} listens on a Unix socket, so {flags.origin(other)} "
                    "has no effect: keep one",
                    param=other,
                )
    if flags["metrics_public"] and not keys:
        raise ConfigError(
            f"{flags.origin('metrics_public')} has no effect without API keys: /metrics is open",
            param="metrics-public",
        )
    settings = flags.build(ServerSettings, api_keys=keys, limits=flags.build(Limits))
    if not (keys or settings.uds or is_loopback(settings.host) or flags["insecure_public"]):
        raise ConfigError(
            f"{flags.origin('host')} {settings.host} lets others in, and there is no API key: "
            "set one with --api-key, --api-key-file or PLAIT_API_KEY, or force it with "
            "--insecure-public",
            param="host",
        )
    return settings


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name other than localhost may not be."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _keys_of_file(path: str | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the API keys in {path}: {reason}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key: write one a line")
    return keys
