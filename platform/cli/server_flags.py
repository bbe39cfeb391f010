"""Settings of the server: what it listens on and serves, and what one request may ask."""

from __future__ import annotations

from typing import Any

from plait.platform.cli.engine_flags import Launch
from plait.platform.cli.flags import Flag, flag
from plait.platform.cli.values import ADAPTER, SIZE
from plait.platform.server.settings import Limits, ServerSettings
from plait.vision.limits import MAX_PIXELS


def _http(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return flag(ServerSettings, "Server", field, help, **more)


def _limit(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return flag(Limits, "Limits of one request", field, help, **more)


ADAPTERS = (
    flag(
        ServerSettings,
        "Adapters",
        "adapters",
        "Adapter to load at start: name=directory or name=hub-id. Repeat it for more.",
        aliases=("lora-modules",),
        kind=ADAPTER,
        metavar="NAME=PATH",
    ),
    flag(
        ServerSettings,
        "Adapters",
        "adapter_dir",
        "Folder of adapters that requests and admins may have loaded, each by its name.",
        metavar="DIR",
    ),
    flag(ServerSettings, "Adapters", "max_adapters", "Most adapters loaded.", low=0),
    flag(
        ServerSettings,
        "Adapters",
        "admin_key",
        "Key that loading and unloading need. Default: neither is served.",
        secret=True,
        metavar="KEY",
    ),
)
HTTP = (
    _http("host", "Address to listen on."),
    _http("port", "Port to listen on; 0: any that is free.", low=0, high=65535),
    _http("uds", "Unix socket to listen on, in place of host and port.", metavar="PATH"),
    _http("root_path", "Prefix under which a proxy serves the API.", metavar="PATH"),
    _http(
        "api_keys",
        "Key that requests must bring. Repeatable.",
        name="api-key",
        secret=True,
        metavar="KEY",
    ),
    flag(Launch, "Server", "api_key_file", "File of keys, one a line.", metavar="FILE"),
    flag(Launch, "Server", "insecure_public", "Listen beyond this machine without any key."),
    _http(
        "allowed_media",
        "Host to fetch images from, such as images.example.com or *.example.com. Repeatable.",
        name="allow-media-url",
        aliases=("allowed-media-domains",),
        metavar="HOST",
    ),
    _http("metrics_public", "Serve /metrics without a key."),
    _http("allowed_origins", "Web origin that may call. Repeatable.", metavar="ORIGIN"),
    _http("allow_unknown_fields", "Log unknown request fields, do not refuse them."),
    _http("log_requests", "No log line per request."),
    flag(
        Launch,
        "Server",
        "log_level",
        "Least important lines to log.",
        choices=("debug", "info", "warning", "error"),
    ),
    _http(
        "keep_alive_interval_s",
        "Seconds of silence in a stream before a comment; 0: never.",
        name="sse-keep-alive-interval",
        low=0,
    ),
    _http(
        "header_delay_s",
        "Seconds a stream waits for an early error before its status.",
        name="stream-status-delay",
        low=0,
    ),
    _http(
        "shutdown_timeout_s",
        "Seconds that running requests get at shutdown.",
        name="shutdown-timeout",
        low=0,
    ),
    _http("num_threads", "Threads for templates and tokenizing.", name="api-threads", low=1),
)
LIMITS = (
    _limit("body_bytes", "Largest request body.", name="max-body-size", kind=SIZE, low=1024),
    _limit(
        "adapter_body_bytes",
        "Largest adapter sent as tensors.",
        name="max-adapter-body-size",
        kind=SIZE,
        low=1024,
    ),
    _limit("n", "Most answers (n).", name="max-n", low=1, high=16),
    _limit("stop", "Most stop strings.", name="max-stop", low=1, high=16),
    _limit("prompts", "Most prompts.", name="max-prompts", low=1),
    _limit("messages", "Most messages.", name="max-messages", low=1),
    _limit("images", "Most images.", name="max-images", low=0),
    _limit("image_bytes", "Largest image file.", name="max-image-bytes", kind=SIZE, low=1024),
    _limit(
        "image_pixels",
        "Most pixels of an image, by its header.",
        name="max-image-pixels",
        low=1,
        high=MAX_PIXELS,
    ),
    _limit(
        "image_body_bytes",
        "Largest chat, where the model takes images.",
        name="max-image-body-size",
        kind=SIZE,
        low=1024,
    ),
)
