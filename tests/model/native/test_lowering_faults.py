"""A program that does not compute what the family computes never serves."""

from dataclasses import replace

import pytest
from support.tiny_models import make_checkpoint

from plait.platform.config import Options
from plait.platform.model import check_model, load, load_model
from plait.platform.model.native import making
from plait.platform.model.native.instructions import (
    AddOp,
    AttentionOp,
    HeadNormOp,
    LinearOp,
    RMSNormOp,
    RopeOp,
    ScaleOp,
)


def change(program, kind, number, **fields):
    """The program with another `number`th instruction of a kind; None: without it."""
    code = list(program.code)
    at = [i for i, op in enumerate(code) if isinstance(op, kind)][number]
    code[at] = replace(code[at], **{k: f(code[at]) for k, f in fields.items()})
    return replace(program, code=tuple(code))


def without(program, kind, number):
    code = list(program.code)
    del code[[i for i, op in enumerate(code) if isinstance(op, kind)][number]]
    return replace(program, code=tuple(code))


FAULTS = {
    "scale": lambda p: change(p, AttentionOp, 1, scale=lambda op: op.scale * 1.05),
    "soft cap": lambda p: change(p, AttentionOp, 1, softcap=lambda _: 0.0),
    "window": lambda p: change(p, AttentionOp, 0, window=lambda _: None),
    "layer of the pages": lambda p: change(p, AttentionOp, 2, layer=lambda op: 1 - op.layer),
    "offset of a norm": lambda p: change(p, RMSNormOp, 3, weight_offset=lambda _: 0.0),
    "no rope": lambda p: without(p, RopeOp, 2),
    "turned twice": lambda p: replace(
        p, code=tuple(x for op in p.code for x in ([op, op] if isinstance(op, RopeOp) else [op]))
    ),
    "another layer's weight": lambda p: change(
        p, LinearOp, 0, weight=lambda _: [o for o in p.code if isinstance(o, LinearOp)][4].weight
    ),
    "no residual": lambda p: without(p, AddOp, 5),
    "another rope": lambda p: change(p, RopeOp, 0, is_interleaved=lambda _: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_program_is_noticed_at_load(fault, tmp_path, monkeypatch):
    directory = make_checkpoint("gemma2", tmp_path)
    lower = making.lower

    def wrongly(*args, **options):
        lowered = lower(*args, **options)
        return replace(lowered, program=FAULTS[fault](lowered.program))

    monkeypatch.setattr(making, "lower", wrongly)
    loaded = load_model(Options(model=str(directory), dtype="float32", progress=False))
    assert loaded.info.executor == "torch"
    (note,) = loaded.info.notes
    assert "layer " in note
    assert "differ from the family's own" in note


@pytest.mark.parametrize(
    ("kind", "family", "fields"),
    [
        (HeadNormOp, "qwen3", {"eps": lambda _: 1.0}),
        (ScaleOp, "granite", {"scale": lambda op: op.scale * 1.01}),
        (AddOp, "granite", {"scale": lambda op: op.scale * 1.01}),
    ],
)
def test_other_instructions_that_are_wrong_are_noticed_too(
    kind, family, fields, tmp_path, monkeypatch
):
    directory = make_checkpoint(family, tmp_path)
    lower = making.lower

    def wrongly(*args, **options):
        lowered = lower(*args, **options)
        return replace(lowered, program=change(lowered.program, kind, 0, **fields))

    monkeypatch.setattr(making, "lower", wrongly)
    loaded = load_model(Options(model=str(directory), dtype="float32", progress=False))
    assert loaded.info.executor == "torch"


def test_a_program_that_its_kernels_refuse_leaves_the_model_to_torch(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise RuntimeError("instruction 3 does not fit")

    monkeypatch.setattr(load, "Runner", refuse)
    directory = make_checkpoint("llama", tmp_path)
    loaded = load_model(Options(model=str(directory), dtype="float32", progress=False))
    assert loaded.info.executor == "torch"
    assert any("instruction 3 does not fit" in note for note in loaded.info.notes)


def test_check_shows_the_program_without_reading_weights(tmp_path):
    directory = make_checkpoint("gemma3", tmp_path)
    (directory / "model.safetensors").rename(directory / "hidden")
    report = check_model(Options(model=str(directory)))
    assert not report.servable  # the headers are needed
    (directory / "hidden").rename(directory / "model.safetensors")
    report = check_model(Options(model=str(directory), dtype="float32"))
    assert report.executor == "native"
    text = "\n".join(report.program)
    assert "window 12" in text
    assert "q_proj+k_proj+v_proj(r1)" in text
    assert "2 layers (0, 2), " in text  # of the kind with windows
    assert "weights float32 (16)" in text


def test_check_says_why_a_model_is_left_to_torch(tmp_path):
    report = check_model(Options(model=str(make_checkpoint("deepseek_v3", tmp_path))))
    assert report.servable
    assert report.executor == "torch"
    assert report.program == ()
    assert any("kv_b_proj" in note for note in report.notes)
