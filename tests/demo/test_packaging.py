"""What was trained is part of every package, is small, and brings no training data along."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from scikit_build_core import build

ROOT = Path(__file__).resolve().parents[2]
PARTS = ROOT / "platform" / "demo" / "parts"
MAX_BYTES = 40_000_000


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def parts() -> set[str]:
    return {str(path.relative_to(PARTS)) for path in PARTS.rglob("*") if path.is_file()}


def test_what_was_trained_is_small() -> None:
    assert sum((PARTS / name).stat().st_size for name in parts()) < MAX_BYTES


def test_a_wheel_has_all_parts_and_nothing_of_training(tmp_path: Path) -> None:
    settings = {"wheel.cmake": "false", "build-dir": str(tmp_path / "build")}  # nothing is compiled
    name = build.build_wheel(str(tmp_path), settings)
    with zipfile.ZipFile(tmp_path / name) as wheel:
        names = set(wheel.namelist())
    assert {f"plait/platform/demo/parts/{part}" for part in parts()} <= names
    assert "plait/platform/demo/assemble.py" in names
    assert {PurePosixPath(n).parts[0] for n in names if "dist-info" not in n} == {"plait"}
    assert not [n for n in names if "training" in n or "renders" in n]


def test_a_source_distribution_has_all_parts_and_nothing_of_training(tmp_path: Path) -> None:
    name = build.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {f"platform/demo/parts/{part}" for part in parts()} <= names
    assert not [n for n in names if n.startswith(("examples", "tests", "docs"))]
