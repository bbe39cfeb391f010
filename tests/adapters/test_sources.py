"""Where adapters come from; the hub is a fake."""

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from plait.adapters.sources import find_adapter
from plait.platform.errors import AdapterFileTooLarge, AdapterPathNotFound, InvalidAdapter

COMMIT = "c" * 40


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one repository; records what is asked of it."""
    hub = SimpleNamespace(asked=[], sizes={"adapter_config.json": 500, "x.bin": 1 << 40})
    hub.sizes["adapter_model.safetensors"] = 1000

    def model_info(self, repo, *, revision=None, files_metadata=False):
        hub.asked.append(("info", repo, revision))
        files = [SimpleNamespace(rfilename=n, size=s) for n, s in hub.sizes.items()]
        return SimpleNamespace(sha=COMMIT, siblings=files)

    def snapshot_download(repo, *, revision, allow_patterns, local_files_only):
        hub.asked.append(("files", repo, revision, local_files_only))
        assert any(p.endswith("adapter_model.safetensors") for p in allow_patterns)
        assert not any("bin" in pattern or "*" in pattern for pattern in allow_patterns)
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        return str(tmp_path / "cache" / COMMIT)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return hub


def test_a_directory_is_used_as_it_is(hub, tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_adapter("owner/name").directory.samefile(tmp_path / "owner" / "name")
    assert hub.asked == []


@pytest.mark.parametrize(("suffix", "revision"), [("", None), ("@v1.2", "v1.2")])
def test_a_hub_id_is_pinned_to_the_commit_that_was_looked_at(hub, suffix, revision):
    source = find_adapter(f"owner/name{suffix}")
    assert source.commit == COMMIT
    assert hub.asked == [("info", "owner/name", revision), ("files", "owner/name", COMMIT, False)]


@pytest.mark.parametrize(
    ("where", "revision", "folder"),
    [
        ("hf://owner/name/a/b", None, "a/b"),
        ("hf://owner/name@v1/checkpoint-5/", "v1", "checkpoint-5"),
        ("hf://owner/name", None, ""),
    ],
)
def test_an_adapter_may_lie_in_a_folder_of_a_repository(hub, where, revision, folder):
    within = f"{folder}/" if folder else ""
    hub.sizes = {within + name: size for name, size in hub.sizes.items()}
    source = find_adapter(where)
    assert source.directory.parts[-1] == (folder.rpartition("/")[2] or COMMIT)
    assert hub.asked == [("info", "owner/name", revision), ("files", "owner/name", COMMIT, False)]


def test_a_folder_is_named_where_it_was_meant(hub):
    with pytest.raises(AdapterPathNotFound, match="hf://owner/name/folder"):
        find_adapter("owner/name/folder")
    with pytest.raises(AdapterPathNotFound):
        find_adapter("hf://owner/name/../other")
    assert hub.asked == []
    hub.sizes = {f"last/{name}": size for name, size in hub.sizes.items()}
    with pytest.raises(InvalidAdapter, match="there is hf://owner/name/last"):
        find_adapter("owner/name")


def test_offline_nothing_is_asked_of_the_hub(hub):
    with pytest.raises(AdapterPathNotFound, match="offline"):
        find_adapter("owner/name", offline=True)
    assert hub.asked == [("files", "owner/name", None, True)]


def test_a_repository_is_looked_at_before_it_is_downloaded(hub):
    hub.sizes["adapter_model.safetensors"] = 1 << 40
    with pytest.raises(AdapterFileTooLarge):
        find_adapter("owner/name")
    del hub.sizes["adapter_model.safetensors"]
    with pytest.raises(InvalidAdapter, match=r"no adapter_model\.safetensors"):
        find_adapter("owner/name")
    assert {asked[0] for asked in hub.asked} == {"info"}


@pytest.mark.parametrize(
    "where", ["./missing", "/missing/path", "a/b/c", "name", "a/../b", "a b/c"]
)
def test_what_looks_like_a_path_never_reaches_the_hub(hub, where):
    with pytest.raises(AdapterPathNotFound):
        find_adapter(where)
    assert hub.asked == []


class NoRouteError(Exception):
    """What an HTTP library raises that we have never heard of."""


@pytest.mark.parametrize("error", [OSError, NoRouteError])
def test_a_hub_that_fails_is_no_fault_of_ours(hub, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(AdapterPathNotFound, match="owner/name"):
        find_adapter("owner/name")
