"""Where an adapter comes from: a directory, or a repository of the hub.

The hub's are `owner/name[@revision]`, or `hf://owner/name[@revision]/folder` where the adapter lies
in a folder of it. What else looks like a path never touches the network. A revision is resolved to
a commit first, so that all files are of one version. Knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.adapters.files import (
    ADDED_TOKENS,
    BUNDLE,
    CHAT_TEMPLATE,
    CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
    FileLimits,
)
from plait.platform.errors import AdapterFileTooLarge, AdapterPathNotFound, InvalidAdapter

_REPO = r"(?P<repo>[\w][\w.-]{0,95}/[\w][\w.-]{0,95})"
_HUB_ID = re.compile(rf"(hf://)?{_REPO}(@(?P<revision>[\w./-]{{1,255}}))?")
# A revision with a slash in it cannot be told from a folder, here as for huggingface_hub.
_HUB_FOLDER = re.compile(
    rf"hf://{_REPO}(@(?P<revision>[\w.-]{{1,255}}))?/(?P<folder>[\w][\w./-]{{0,255}})"
)
_IN_A_FOLDER = re.compile(rf"{_REPO}/\w.*")
_FILES = (
    CONFIG,
    WEIGHTS,
    BUNDLE,
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)


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
    limits = limits or FileLimits()
    in_folder = _HUB_FOLDER.fullmatch(where)
    if in_folder is not None:
        folder = in_folder["folder"].rstrip("/")
        if ".." in folder.split("/"):
            raise AdapterPathNotFound(f"{where[:200]!r} leads out of its repository")
        return _from_hub(in_folder["repo"], in_folder["revision"], folder, offline, limits)
    hub_id = _HUB_ID.fullmatch(where)
    if hub_id is None:
        hint = f"; a folder of a hub repository is hf://{where}"
        raise AdapterPathNotFound(
            f"there is no adapter at {where[:200]!r}: neither a directory nor a hub id (owner/name)"
            + (hint if _IN_A_FOLDER.fullmatch(where) else "")
        )
    return _from_hub(hub_id["repo"], hub_id["revision"], "", offline, limits)


def _from_hub(
    repo: str, revision: str | None, folder: str, offline: bool, limits: FileLimits
) -> AdapterSource:
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    offline = offline or bool(constants.HF_HUB_OFFLINE)
    within = f"{folder}/" if folder else ""
    try:
        if not offline:
            info = _ask(repo, revision)
            _check_files(repo, within, info.siblings or [], limits)
            revision = info.sha
        directory = hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[within + name for name in _FILES],
            local_files_only=offline,
        )
    except LocalEntryNotFoundError:
        raise AdapterPathNotFound(
            f"{repo} is neither a directory nor downloaded, and the hub is not asked (offline)"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _not_given(repo, error) from None
    return AdapterSource(directory=Path(directory) / folder, commit=Path(directory).name)


def _ask(repo: str, revision: str | None) -> Any:
    """What the hub knows of a repository."""
    import huggingface_hub as hub

    try:
        return hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
    except Exception as error:  # noqa: BLE001 - of whichever HTTP library this release is built on
        raise _not_given(repo, error) from None


def _not_given(repo: str, error: Exception) -> AdapterPathNotFound:
    return AdapterPathNotFound(
        f"{repo} is no directory, and the hub did not give it: {type(error).__name__}"
    )


def _check_files(repo: str, within: str, files: list[Any], limits: FileLimits) -> None:
    """Look before anything is downloaded."""
    sizes = {file.rfilename: file.size or 0 for file in files}
    for name in (CONFIG, WEIGHTS):
        if within + name not in sizes:
            raise InvalidAdapter(
                f"{repo} is no adapter that can be served: it has no {within}{name}"
                + _elsewhere(repo, sizes)
            )
    for name in _FILES:
        size, limit = sizes.get(within + name, 0), limits.of(name)
        if size > limit:
            raise AdapterFileTooLarge(f"{repo}: {name} has {size:,} bytes, above {limit:,}")


def _elsewhere(repo: str, sizes: Mapping[str, int]) -> str:
    """Where else in the repository adapters lie."""
    folders = sorted(n.rpartition("/")[0] for n in sizes if n.endswith(f"/{WEIGHTS}"))
    if not folders:
        return ""
    more = f", and {len(folders) - 3} more" if len(folders) > 3 else ""
    return "; there is " + ", ".join(f"hf://{repo}/{f}" for f in folders[:3]) + more
