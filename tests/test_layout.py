"""The layout: top-level folder X is plait.X, and no folder takes the place of a standard module."""

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import plait
from plait.platform.ops._load import load_library

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = SETTINGS["tool"]["scikit-build"]["wheel"]["packages"]
WITHOUT_PACKAGE = {"build", "csrc", "docs", "examples", "scripts", "tests"}


def test_platform_never_shadows_the_standard_module():
    assert not (ROOT / "platform" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_folder_with_code_is_a_package():
    folders = {path.parts[len(ROOT.parts)] for path in ROOT.glob("[!.]*/**/*.py")}
    assert folders - WITHOUT_PACKAGE == set(PACKAGES.values())
    assert all(name == f"plait/{folder}" for name, folder in PACKAGES.items())


@pytest.mark.parametrize("folder", sorted(PACKAGES.values()))
def test_folder_is_imported_as_part_of_plait(folder):
    package = importlib.import_module(f"plait.{folder}")
    assert str(ROOT / folder) in list(package.__path__)


def test_version_has_one_place():
    assert plait.__version__ == SETTINGS["project"]["version"]
    assert plait.__version__ == importlib.metadata.version("plait")


def test_importing_plait_leaves_torch_alone():
    code = "import plait, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cpp_library_is_built_and_tells_its_version():
    load_library()
    assert torch.ops.plait.build_info().startswith(f"plait {plait.__version__}, ")
