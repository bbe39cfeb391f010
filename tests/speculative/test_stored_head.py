"""A head that an earlier start packed is the same, and is packed anew when anything changed."""

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from support.eagle_heads import HeadShape, head_tensors, write_head
from support.eagle_world import load_target, make_head
from torch import Tensor

from plait.platform.config import Options
from plait.platform.starting import stored_head
from plait.platform.starting.head_loading import load_drafting_head
from plait.platform.starting.stored_head import recall_head
from plait.speculative import eagle_head
from plait.speculative.eagle_weights import Kept, load_weights


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, load_target(directory, quantization="int8")[0]


@pytest.fixture
def packed(monkeypatch):
    """How often a head was read and packed."""
    found = []

    def loads(*args):
        found.append(args)
        return load_weights(*args)

    monkeypatch.setattr(eagle_head, "load_weights", loads)
    monkeypatch.setattr(stored_head, "MIN_BYTES", 0)
    return found


def options_of(model, path, cache):
    return Options(model=str(model[0]), draft_model=str(path), packed_cache=str(cache))


def bytes_of(weights):
    """Every tensor of the weights, by field."""
    found = {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value
        elif value is not None:
            found |= {
                f"{field.name}.{f.name}": part
                for f in fields(value)
                if isinstance(part := getattr(value, f.name), Tensor)
            }
    return found


@pytest.mark.parametrize("own_rows", [True, False])
def test_a_later_start_reads_what_the_first_packed(own_rows, model, packed, tmp_path):
    shape = HeadShape()
    tensors = head_tensors(shape, 1)
    if not own_rows:
        del tensors["lm_head.weight"]
    path = write_head(tmp_path / "head", shape, tensors)
    options = options_of(model, path, tmp_path / "cache")
    first, later = (load_drafting_head(path, options, model[1]).head for _ in range(2))
    assert len(packed) == 1
    one, other = bytes_of(first._weights), bytes_of(later._weights)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert first.weight_bytes == later.weight_bytes
    rows = torch.randn(5, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first.logits(rows), later.logits(rows))


def test_what_changed_is_packed_anew(model, packed, tmp_path):
    path, shape, _ = make_head(tmp_path / "head")
    options = options_of(model, path, tmp_path / "cache")
    load = partial(load_drafting_head, path, executor=model[1])
    before = load(options).head
    write_head(path, shape, head_tensors(shape, 7))
    after = load(options).head
    assert len(packed) == 2
    assert not torch.equal(
        bytes_of(before._weights)["fc.blob"], bytes_of(after._weights)["fc.blob"]
    )
    load(replace(options, quantized_activations="exact"))
    assert len(packed) == 3
    load(replace(options, packed_cache="off"))
    assert len(packed) == 4
    load(options)
    assert len(packed) == 4
    for file in (tmp_path / "cache").glob("*.weights"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    load(options)
    assert len(packed) == 5


def test_a_head_of_a_model_that_is_not_there_is_made(packed, tmp_path):
    made = object()
    options = Options(model=str(tmp_path / "nothing"), packed_cache=str(tmp_path / "cache"))
    assert recall_head(options, tmp_path, Kept(), lambda: made) is made
