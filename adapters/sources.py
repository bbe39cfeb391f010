"""Where an adapter comes from: a directory, or a repository of the hub as `owner/name[@revision]`.

What looks like a path never touches the network. A revision is resolved to a commit first, so that
all files are of one version. Knows no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.adapters.files import ADDED_TOKENS, BUNDLE, CONFIG, WEIGHTS, FileLimits
from plait.platform.errors import AdapterFileTooLarge, AdapterPathNotFound, InvalidAdapter

_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]{0,95}/[\w][\w.-]{0,95})(@(?P<revision>[\w./-]{1,255}))?")
_FILES = (CONFIG, WEIGHTS, BUNDLE, ADDED_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """Files of an adapter that are here."""

    directory: Path
    commit: str = ""  # of the hub's repository


def find_adapter(
    where: str, *, offline: bool = False, limits: FileLimits | None = None
) -> AdapterSource:
    """The directory of an adapter that is named by path or by hub id; downloads what is missing.

    With `offline`, only what was downloaded before. Raises `AdapterPathNotFound` where there is
    none, `InvalidAdapter` where a repository holds none.
    """
    path = Path(where).expanduser()
    if path.exists():
        return AdapterSource(directory=path)
    hub_id = _HUB_ID.fullmatch(where)
    if hub_id is None:
        raise AdapterPathNotFound(
            f"there is no adapter at {where[:200]!r}: neither a directory nor a hub id (owner/name)"
        )
    return _from_hub(hub_id["repo"], hub_id["revision"], offline, limits or FileLimits())


def _from_hub(repo: str, revision: str | None, offline: bool, limits: FileLimits) -> AdapterSource:
    import httpx
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    offline = offline or bool(hub.constants.HF_HUB_OFFLINE)
    try:
        if not offline:
            info = hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
            _check_files(repo, info.siblings or [], limits)
            revision = info.sha
        directory = hub.snapshot_download(
            repo, revision=revision, allow_patterns=list(_FILES), local_files_only=offline
        )
    except LocalEntryNotFoundError:
        raise AdapterPathNotFound(
            f"{repo} is neither a directory nor downloaded, and the hub is not asked (offline)"
        ) from None
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        raise AdapterPathNotFound(
            f"{repo} is no directory, and the hub did not give it: {type(error).__name__}"
        ) from None
    return AdapterSource(directory=Path(directory), commit=Path(directory).name)


def _check_files(repo: str, files: list[Any], limits: FileLimits) -> None:
    """Look before anything is downloaded."""
    sizes = {file.rfilename: file.size or 0 for file in files}
    for name in (CONFIG, WEIGHTS):
        if name not in sizes:
            raise InvalidAdapter(f"{repo} is no adapter that can be served: it has no {name}")
    for name in _FILES:
        limit = limits.weights_bytes if name == WEIGHTS else limits.config_bytes
        if sizes.get(name, 0) > limit:
            raise AdapterFileTooLarge(f"{repo}: {name} has {sizes[name]:,} bytes, above {limit:,}")
