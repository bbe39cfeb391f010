"""Installs peers, each into an environment of its own, and only when asked."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from plait.platform.bench.entries import PEERS, Peer, python_of
from plait.platform.errors import ConfigError


def peer_named(name: str) -> Peer:
    """The peer; raises where there is none."""
    for peer in PEERS:
        if peer.name == name:
            return peer
    known = ", ".join(peer.name for peer in PEERS)
    raise ConfigError(f"--install knows no {name}; there are {known}", param="install")


def install(peer: Peer, folder: Path, tell: Callable[[str], None]) -> None:
    """Make `folder`/name and install the pinned packages there; nothing where they are."""
    if python_of(peer.name, folder) is not None:
        tell(f"{peer.name}: is installed")
        return
    home = folder / peer.name
    tell(f"{peer.name}: {', '.join(peer.packages)} into {home}; {peer.size}")
    if peer.note:
        tell(f"{peer.name}: {peer.note}")
    venv.create(home, with_pip=True, symlinks=os.name != "nt")
    done = _pip(home, peer, "install", *peer.packages)
    if done == 0 and peer.unwanted:
        done = _pip(home, peer, "uninstall", "--yes", *peer.unwanted)
    if done != 0 or python_of(peer.name, folder) is None:
        raise ConfigError(
            f"pip could not install {peer.name} (its messages are above): delete {home} and try "
            "again, or compare without it",
            param="install",
        )


def _pip(home: Path, peer: Peer, command: str, *arguments: str) -> int:
    """Run the environment's own; what it says goes to our messages, not among our results."""
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    return subprocess.run(
        [*pip, command, "--no-input", *arguments],
        env=os.environ | dict(peer.environment),
        stdout=sys.stderr,
        check=False,
    ).returncode
