"""Adapters of the draft model: they come and go with the adapter that brings them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.draft_engine import DraftEngine, options
from support.small_adapters import CONFIG, write_small_adapter

from plait.adapters.composition import uses
from plait.adapters.store import AdapterStore
from plait.platform.core import AdapterUse
from plait.platform.errors import InvalidAdapter
from plait.platform.messages import AdapterLoaded

Checkpoint = Callable[[str], Path]


def write(folder: Path, seed: int, *, draft: int | None = None, **config: object) -> Path:
    """An adapter; with that of `draft` in it, for the draft model."""
    write_small_adapter(folder, seed)
    if draft is not None:
        write_small_adapter(folder / "for-draft", draft)
        text = json.dumps({**CONFIG, **config})
        (folder / "for-draft" / "adapter_config.json").write_text(text)
        (folder / "plait_adapter.json").write_text(json.dumps({"draft_adapter": "for-draft"}))
    return folder


def use(loaded: AdapterLoaded, scale: float = 1.0) -> AdapterUse:
    assert loaded.info is not None, loaded.error
    ((_, one),) = uses([(loaded.info, scale)], (1,))
    return one


def test_adapters_of_both_models_work_as_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The draft model equals the target, so with its adapters it is always right."""
    path = checkpoint("llama")
    folders = [write(tmp_path / name, i, draft=i) for i, name in enumerate("ab")]
    plain = DraftEngine(options(path), tmp_path / "plain")
    drafting = DraftEngine(options(path, path), tmp_path / "drafting")
    answers = []
    for engine in (plain, drafting):
        one, two = (use(engine.load(folder)) for folder in folders)
        half = AdapterUse(**{**{f: getattr(two, f) for f in two.__slots__}, "scale": 0.5})
        answers.append(engine.run((one,), (), (half,), (one, two)))
    assert answers[0] == answers[1]
    assert drafting.source.figures["faults"] == 0
    assert drafting.num_held == drafting.num_drafts > 100


def test_without_adapters_of_its_own_the_draft_model_drafts_as_it_is(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("llama")
    engine = DraftEngine(options(path, path), tmp_path / "store")
    one = use(engine.load(write(tmp_path / "a", 1)))
    engine.run((one,))
    assert one.draft == ""
    assert engine.source.figures["faults"] == 0
    assert engine.num_drafts > 0
    assert engine.num_held < engine.num_drafts / 2


def test_bytes_of_both_count_and_go(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("llama")
    engine = DraftEngine(options(path, path), tmp_path / "store")
    assert engine.draft is not None
    alone = engine.load(write(tmp_path / "a", 1)).info
    both = engine.load(write(tmp_path / "b", 2, draft=3)).info
    assert alone is not None
    assert both is not None
    assert both.num_bytes == 2 * alone.num_bytes
    assert both.device_bytes == 2 * alone.device_bytes
    assert engine.draft.executor.placed_bytes == alone.device_bytes
    engine.engine.drop_adapter(both.generation)
    assert engine.draft.executor.placed_bytes == 0


def test_without_a_draft_model_its_adapter_is_reported(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    engine = DraftEngine(options(checkpoint("llama")), tmp_path / "store")
    info = engine.load(write(tmp_path / "a", 1, draft=2)).info
    assert info is not None
    assert info.draft == ""
    assert any("draft_adapter 'for-draft'" in warning for warning in info.report.warnings)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"target_modules": ["nothing"]}, "draft_adapter 'for-draft': "),
        ({"use_dora": True}, "draft_adapter 'for-draft': "),
        ({"r": 1000}, "draft_adapter 'for-draft': "),
        ({"alora_invocation_tokens": [5]}, "waits for an invocation"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_the_draft_model_cannot_use_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    path = checkpoint("llama")
    engine = DraftEngine(options(path, path), tmp_path / "store")
    answer = engine.load(write(tmp_path / "a", 1, draft=2, **config))
    assert answer.error is not None
    code, message = answer.error
    assert code == InvalidAdapter.code
    assert reason in message


def test_a_generation_is_its_draft_models_adapter_too(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store")
    made = [
        store.add_directory(write(tmp_path / name, 1, draft=draft))
        for name, draft in (("a", 2), ("b", 3), ("c", 2), ("d", None))
    ]
    first, other, same, none = (stored.generation for stored in made)
    assert first == same
    assert len({first, other, none}) == 3
    assert (made[0].directory / "for-draft" / "adapter_model.safetensors").is_file()
    for stored in made:
        store.remove(stored.generation)
    assert not made[0].directory.exists()


def test_a_folder_that_is_missing_or_elsewhere_is_refused(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store")
    folder = write(tmp_path / "in" / "a", 1, draft=2)
    shutil.move(folder / "for-draft", tmp_path / "elsewhere")
    with pytest.raises(InvalidAdapter, match="draft_adapter 'for-draft': there is no adapter"):
        store.add_directory(folder)
    (folder / "for-draft").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidAdapter, match="symbolic link"):
        store.add_directory(Path("a"), inside=tmp_path / "in")
    for name in ("../elsewhere", "/etc", "..", ".", ""):
        (folder / "plait_adapter.json").write_text(json.dumps({"draft_adapter": name}))
        with pytest.raises(InvalidAdapter, match="name of a folder"):
            store.add_directory(folder)
