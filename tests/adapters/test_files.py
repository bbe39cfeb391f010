"""Files from anywhere: each kind of damage or malice has its error, and nothing else happens."""

import json
import os
import pickle
import shutil
import struct
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from plait.adapters import files
from plait.adapters.files import CONFIG, WEIGHTS, FileLimits, parse_json
from plait.adapters.store import AdapterStore
from plait.platform.errors import (
    AdapterError,
    AdapterFileChanged,
    AdapterFileTooLarge,
    AdapterPathForbidden,
    AdapterPathNotFound,
    InvalidAdapter,
)

A, B = "model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.lora_B.weight"
TENSORS = {A: torch.ones(2, 8), B: torch.ones(8, 2)}
LIMITS = FileLimits(config_bytes=10_000, weights_bytes=100_000, header_bytes=5_000)


@pytest.fixture
def store(tmp_path):
    store = AdapterStore(tmp_path / "store", LIMITS)
    yield store
    # Whatever was refused left nothing behind.
    assert not [p for p in (tmp_path / "store").iterdir() if p.name.startswith("incoming")]
    store.close()
    assert not (tmp_path / "store").exists()


@pytest.fixture
def adapter(tmp_path):
    """A good adapter in a folder of its own, inside a folder of adapters."""
    directory = tmp_path / "adapters" / "good"
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    (directory / WEIGHTS).write_bytes(save(TENSORS))
    return directory


def with_header(header, data=b"", *, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD = save(TENSORS)
DATA = b"\0" * 16
BROKEN_WEIGHTS = {
    "empty": b"",
    "short": b"\1\0\0",
    "a pickle": pickle.dumps({"a": 1}),
    "cut in the header": GOOD[:20],
    "cut in the data": GOOD[:-1],
    "longer than its tensors": GOOD + b"\0",
    "header longer than the file": with_header({}, length=1 << 20),
    "header of 2^63 bytes": with_header({}, length=1 << 63),
    "header above the limit": with_header(b"{" + b" " * 6000 + b"}"),
    "no object": with_header([1]),
    "no JSON": with_header(b"{'a': 1}"),
    "no UTF-8": with_header(b'{"\xff": 1}'),
    "nested": with_header(b"[" * 100 + b"]" * 100),
    "nested behind a quote": with_header(b'{"\\"": ' + b"[" * 100 + b"]" * 100 + b"}"),
    "same name twice": with_header(
        f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}'.encode(), DATA
    ),
    "overlap": with_header({"a": entry(), "b": entry(offsets=(8, 24))}, DATA + DATA),
    "same data twice": with_header({"a": entry(), "b": entry()}, DATA),
    "gap": with_header({"a": entry(), "b": entry(offsets=(20, 36))}, b"\0" * 36),
    "outside the file": with_header({"a": entry(offsets=(16, 32))}, DATA),
    "negative": with_header({"a": entry(offsets=(-16, 0))}, DATA),
    "backwards": with_header({"a": entry(offsets=(16, 0))}, DATA),
    "fewer bytes than its shape": with_header({"a": entry(offsets=(0, 12))}, b"\0" * 12),
    "shape that overflows": with_header({"a": entry(shape=(1 << 61, 1 << 61))}, DATA),
    "negative shape": with_header({"a": entry(shape=(-2, -2))}, DATA),
    "shape of booleans": with_header({"a": entry(shape=(True, 4))}, DATA),
    "shape of floats": with_header({"a": entry(shape=(2.0, 2))}, DATA),
    "integers": with_header({"a": entry(dtype="I32")}, DATA),
    "float8": with_header({"a": entry(dtype="F8_E4M3", shape=(4, 4))}, DATA),
    "dtype of another type": with_header({"a": {**entry(), "dtype": ["F32"]}}, DATA),
    "a field too many": with_header({"a": {**entry(), "x": 1}}, DATA),
    "a field too few": with_header({"a": {"dtype": "F32", "shape": [2, 2]}}, DATA),
    "metadata of numbers": with_header({"__metadata__": {"a": 1}, "a": entry()}, DATA),
    "name of control characters": with_header({"a\n": entry()}, DATA),
    "infinite number": with_header(b'{"a": Infinity}'),
}


@pytest.mark.parametrize("weights", BROKEN_WEIGHTS.values(), ids=BROKEN_WEIGHTS.keys())
def test_broken_weights_are_refused(store, adapter, weights):
    (adapter / WEIGHTS).write_bytes(weights)
    with pytest.raises(InvalidAdapter, match=WEIGHTS):
        store.add_directory(adapter)
    with pytest.raises(InvalidAdapter, match=WEIGHTS):
        store.add_tensors({"r": 2}, weights)


BROKEN_CONFIGS = {
    "empty": b"",
    "a list": b"[]",
    "no UTF-8": b'{"r": "\xff"}',
    "key twice": b'{"r": 2, "r": 3}',
    "not a number": b'{"lora_alpha": NaN}',
    "a number of many digits": b'{"r": ' + b"1" * 5000 + b"}",
    "half of a surrogate pair": rb'{"base_model_name_or_path": "x/\ud800"}',
    "half of a pair, reversed": rb'{"target_modules": ["q_proj", "\udC00\ud800"]}',
    "nested": b'{"rank_pattern": ' + b'{"a": ' * 80 + b"1" + b"}" * 81,
}


@pytest.mark.parametrize("config", BROKEN_CONFIGS.values(), ids=BROKEN_CONFIGS.keys())
def test_broken_configs_are_refused(store, adapter, config):
    (adapter / CONFIG).write_bytes(config)
    with pytest.raises(InvalidAdapter, match=CONFIG):
        store.add_directory(adapter)


def test_a_key_that_stands_twice_among_very_many_is_found_at_once():
    data = b"{%s}" % b",".join(b'"%d": 0' % (n % 90_000) for n in range(2 * 90_000))
    start = time.monotonic()
    with pytest.raises(InvalidAdapter, match="the key '0' stands twice"):
        parse_json(data, CONFIG, FileLimits())
    assert time.monotonic() - start < 5


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_header_does_more_than_be_refused(tmp_path_factory, data):
    """Bytes of a good file changed, or a header of odd values: an error of ours, or a good file."""
    if data.draw(st.booleans()):
        raw = bytearray(GOOD)
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        weights = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    else:
        value = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
            ),
            max_leaves=5,
        )
        odd = dict.fromkeys(("dtype", "shape", "data_offsets"), value)
        near = {
            "dtype": st.sampled_from(["F32", "F16", "BF16", "I8"]),
            "shape": st.lists(st.integers(-1, 4), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2),
        }
        fields = st.fixed_dictionaries(near) | st.fixed_dictionaries(odd) | value
        header = data.draw(st.dictionaries(st.text(max_size=3), fields, max_size=3))
        weights = with_header(header, data.draw(st.binary(max_size=40)))
    try:
        content = files.parse_json(
            weights[8:][: int.from_bytes(weights[:8], "little")], WEIGHTS, LIMITS
        )
    except InvalidAdapter:
        content = None
    root = tmp_path_factory.getbasetemp() / "fuzz"
    try:
        stored = AdapterStore(root, LIMITS).add_tensors({"r": 2}, weights)
    except InvalidAdapter:
        return
    # What passes has every tensor inside the file, in bytes of its own.
    from safetensors.torch import load

    assert (stored.directory / WEIGHTS).read_bytes() == weights
    assert load(weights).keys() == content.keys() - {"__metadata__"}


def test_a_missing_part_is_named(store, adapter):
    with pytest.raises(AdapterPathNotFound):
        store.add_directory(adapter / "nowhere")
    with pytest.raises(AdapterPathNotFound, match="NUL"):
        store.add_directory(adapter / "a\0b")
    with pytest.raises(InvalidAdapter, match="not a directory"):
        store.add_directory(adapter / WEIGHTS)
    (adapter / CONFIG).rename(adapter / "config.json")
    with pytest.raises(InvalidAdapter, match=f"{CONFIG} is missing"):
        store.add_directory(adapter)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter_model.bin", "pickle"),
        ("x.pt", "pickle"),
        ("adapter_model.safetensors.index.json", "several files"),
        ("adapter_model-00001-of-00002.safetensors", "several files"),
        ("README.md", "missing"),
    ],
)
def test_other_formats_are_named_and_never_opened(store, adapter, name, message):
    (adapter / WEIGHTS).unlink()
    (adapter / name).write_bytes(b"")
    (adapter / name).chmod(0)
    with pytest.raises(InvalidAdapter, match=message):
        store.add_directory(adapter)


def test_files_above_their_limits_are_refused(store, adapter):
    (adapter / CONFIG).write_bytes(b'{"r": 2}' + b" " * 10_000)
    with pytest.raises(AdapterFileTooLarge, match=CONFIG):
        store.add_directory(adapter)
    (adapter / CONFIG).write_bytes(b'{"r": 2}')
    with (adapter / WEIGHTS).open("r+b") as file:
        file.truncate(1 << 40)  # sparse: no such bytes are there
    with pytest.raises(AdapterFileTooLarge, match=WEIGHTS):
        store.add_directory(adapter)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_pipes_and_devices_are_refused_without_waiting(store, adapter, name):
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(InvalidAdapter, match="plain file"):
        store.add_directory(adapter)
    (adapter / name).unlink()
    (adapter / name).mkdir()
    with pytest.raises(InvalidAdapter, match="plain file"):
        store.add_directory(adapter)
    (adapter / name).rmdir()
    (adapter / name).symlink_to("/dev/zero")
    with pytest.raises(InvalidAdapter, match="plain file"):
        store.add_directory(adapter)


@pytest.mark.parametrize(
    "path",
    [*("../outside", "good/../../outside", "/etc", "..", ".", ""), "link", "link/inner", "in/link"],
)
def test_no_path_leads_out_of_the_jail(store, adapter, tmp_path, path):
    root = adapter.parent
    outside = adapter.rename(tmp_path / "outside")
    (outside / "inner").mkdir()
    (root / "link").symlink_to(outside)
    (root / "in").mkdir()
    (root / "in" / "link").symlink_to(outside)
    (root / "good").mkdir()
    with pytest.raises(AdapterPathForbidden):
        store.add_directory(type(root)(path), inside=root)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "plait_adapter.json"])
def test_links_to_files_are_followed_outside_a_jail_alone(store, adapter, tmp_path, name):
    """The hub's cache is made of links; a folder that others fill may hold none."""
    if not (adapter / name).exists():
        (adapter / name).write_text("{}")
    (adapter / name).rename(tmp_path / "blob")
    (adapter / name).symlink_to(tmp_path / "blob")
    stored = store.add_directory(adapter)
    assert not (stored.directory / name).is_symlink()
    with pytest.raises(AdapterPathForbidden, match="symbolic link"):
        store.add_directory(adapter, inside=adapter.parent)


def test_a_jailed_adapter_is_found_by_relative_and_by_full_path(store, adapter):
    first = store.add_directory(adapter.relative_to(adapter.parent), inside=adapter.parent)
    assert store.add_directory(adapter, inside=adapter.parent) == first


@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite"])
def test_a_file_that_changes_while_it_is_read_is_refused(store, adapter, monkeypatch, change):
    path = adapter / WEIGHTS
    whole = path.read_bytes()

    def meddle(file, limits, size=None, *, read=files.read_header):
        result = read(file, limits, size)
        with path.open("r+b") as other:
            if change == "shrink":
                other.truncate(len(whole) - 8)
            else:
                other.seek(0 if change == "rewrite" else len(whole))
                other.write(b"\0")
        os.utime(path, ns=(1, 1))
        return result

    monkeypatch.setattr("plait.adapters.store.read_header", meddle)
    with pytest.raises(AdapterFileChanged, match="load it again"):
        store.add_directory(adapter)


def test_equal_bytes_are_one_generation_and_live_as_long_as_any_hold(store, adapter, tmp_path):
    first = store.add_directory(adapter)
    config, weights = (adapter / CONFIG).read_bytes(), (adapter / WEIGHTS).read_bytes()
    second = store.add_tensors(config, weights)
    assert first == second
    assert [p.name for p in (tmp_path / "store").iterdir()] == [first.generation]
    assert (first.directory / WEIGHTS).read_bytes() == weights
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    store.remove(first.generation)
    assert first.directory.exists()
    store.remove(first.generation)
    assert not first.directory.exists()
    store.remove(first.generation)  # more often than it was added: nothing to do


@pytest.mark.parametrize("lost", ["", "{generation}", "{generation}/adapter_model.safetensors"])
def test_what_others_deleted_is_there_again_once_it_is_stored_again(store, adapter, tmp_path, lost):
    stored = store.add_directory(adapter)
    gone = tmp_path / "store" / lost.format(generation=stored.generation)
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert store.add_directory(adapter) == stored
    assert {path.name for path in stored.directory.iterdir()} == {CONFIG, WEIGHTS}


def test_every_file_that_counts_is_in_the_generation(store, adapter):
    generations = {store.add_directory(adapter).generation}
    (adapter / "README.md").write_text("not part of it")
    generations.add(store.add_directory(adapter).generation)
    assert len(generations) == 1
    (adapter / "plait_adapter.json").write_text('{"stop": "."}')
    generations.add(store.add_directory(adapter).generation)
    (adapter / "added_tokens.json").write_text('{"<new>": 307}')
    stored = store.add_directory(adapter)
    assert [(t.token_id, t.text) for t in stored.tokenizer.added_tokens] == [(307, "<new>")]
    assert stored.bundle.stop == (".",)
    generations.add(stored.generation)
    (adapter / CONFIG).write_text(json.dumps({"r": 2, "lora_alpha": 9}))
    generations.add(store.add_directory(adapter).generation)
    (adapter / WEIGHTS).write_bytes(save({A: torch.zeros(2, 8), B: torch.ones(8, 2)}))
    generations.add(store.add_directory(adapter).generation)
    assert len(generations) == 5


def test_many_threads_may_store_and_remove(store, adapter):
    faults = []

    def work(seed):
        try:
            for turn in range(10):
                tensors = {A: torch.full((2, 8), float((seed + turn) % 3)), B: torch.ones(8, 2)}
                stored = store.add_tensors({"r": 2}, save(tensors))
                assert (stored.directory / WEIGHTS).is_file()
                store.remove(stored.generation)
        except (AdapterError, AssertionError) as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_store_begins_without_adapters_and_leaves_alone_what_is_not_its_own(tmp_path):
    root = tmp_path / "store"
    AdapterStore(root).add_tensors({"r": 2}, GOOD)
    (root / "notes").write_text("someone else's")
    AdapterStore(root)
    assert [path.name for path in root.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    "tokens", ["[]", '{"a": -1}', '{"a": 1, "b": 1}', '{"": 1}', '{"a": true}']
)
def test_added_tokens_that_are_none_are_refused(store, adapter, tokens):
    (adapter / "added_tokens.json").write_text(tokens)
    with pytest.raises(InvalidAdapter, match=r"added_tokens\.json"):
        store.add_directory(adapter)
