"""From resolved flags to `Options` and `ServerSettings`; what must not be combined."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.platform.cli.sources import Resolved
from plait.platform.config import Options
from plait.platform.errors import ConfigError
from plait.platform.server.access import Grant
from plait.platform.server.settings import Limits, ServerSettings


def engine_options(flags: Resolved, **extra: object) -> Options:
    """What the engine is asked for; `extra` goes before the flags."""
    options = flags.build(Options, **(_speculative(flags) | extra))
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


def _speculative(flags: Resolved) -> dict[str, Any]:
    if not flags.values.get("speculative_config"):
        return {}
    from plait.platform.cli.speculative_config import speculative_options

    origin = flags.origin("speculative_config")
    for other in ("speculation", "draft", "max_draft_tokens"):
        if flags.given(other):
            raise ConfigError(
                f"{origin} and {flags.origin(other)} both decide on speculation: keep one",
                param="speculative-config",
            )
    return speculative_options(flags["speculative_config"], origin)


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
    grants = _grants_of_file(flags["api_key_file"])
    plain = tuple(g.key for g in grants if g == Grant(key=g.key))
    keys = (*flags["api_key"], *plain)
    limited = tuple(g for g in grants if g.key not in plain)
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key is empty", param="api-key")
    _check_keys(keys, [g.key for g in limited], flags["admin_key"])
    if flags.given("uds"):
        for other in ("host", "port"):
            if flags.given(other):
                raise ConfigError(
                    f"{flags.origin('uds')} listens on a Unix socket, so {flags.origin(other)} "
                    "has no effect: keep one",
                    param=other,
                )
    _check_media(flags)
    if flags["metrics_public"] and not (keys or limited):
        raise ConfigError(
            f"{flags.origin('metrics_public')} has no effect without API keys: /metrics is open",
            param="metrics-public",
        )
    settings = flags.build(
        ServerSettings, api_keys=keys, grants=limited, limits=flags.build(Limits)
    )
    if not (
        keys or limited or settings.uds or is_loopback(settings.host) or flags["insecure_public"]
    ):
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


def _check_media(flags: Resolved) -> None:
    if not flags["allow_media_url"]:
        return
    from plait.vision.hosts import AllowList

    try:
        AllowList.parse(flags["allow_media_url"])
    except ValueError as error:
        raise ConfigError(
            f"{flags.origin('allow_media_url')}: {error}", param="allow-media-url"
        ) from None


def _check_keys(keys: Sequence[str], limited: Sequence[str], admin_key: str | None) -> None:
    """A key that stands twice would have two meanings; an admin's is for admins alone."""
    if len(set(keys) & set(limited)) > 0:
        raise ConfigError("an API key stands twice, with limits and without", param="api-key")
    if admin_key is not None and not admin_key.strip():
        raise ConfigError("the admin key is empty", param="admin-key")
    if admin_key in (*keys, *limited):
        raise ConfigError(
            "the admin key is an API key as well: whoever has that could load adapters",
            param="admin-key",
        )


def _grants_of_file(path: str | None) -> tuple[Grant, ...]:
    if path is None:
        return ()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the API keys in {path}: {reason}") from None
    grants: dict[str, Grant] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            grant = _grant(line, f"{path} line {number}")
            if grants.setdefault(grant.key, grant) != grant:
                raise ConfigError(f"{path} line {number}: this key stands above with other limits")
    if not grants:
        raise ConfigError(f"{path} holds no API key: write one a line")
    return tuple(grants.values())


def _grant(line: str, origin: str) -> Grant:
    try:
        return Grant.parse(line)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}", param="api-key-file") from None
