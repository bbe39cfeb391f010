"""A step's rows of bits: each position its own, both libraries in one batch, faults apart."""

from __future__ import annotations

import threading

import numpy as np
import torch
from support.grammars import (
    BACKENDS,
    END,
    FIRST_LONGER,
    OTHER_END,
    allowed,
    bits,
    matcher,
    schema_matcher,
    vocabulary,
)

from plait.structured.backends import ParserFault, create
from plait.structured.masks import MaskEntry, MaskFiller, fill_masks
from plait.structured.matcher import Matcher
from plait.structured.spec import GrammarKind

ENDS = {END, OTHER_END}


def test_entries_of_both_libraries_share_a_batch_with_free_rows():
    filler = MaskFiller()
    made = [schema_matcher(name, {"type": "boolean"}) for name in BACKENDS]
    draft = tuple(b"tru")
    entries = [
        MaskEntry(matcher=made[0], first_row=1, drafts=draft),
        MaskEntry(matcher=made[1], first_row=6, drafts=(ord("f"), ord("x"), ord("y"))),
    ]
    masks = filler.start(entries, 11).result()
    filler.close()
    assert masks.mask_rows.tolist() == [-1, 0, 1, 2, 3, -1, 4, 5, -1, -1, -1]
    assert masks.num_legal == (3, 1)
    assert masks.faults == {}
    t, r, u, e, f, a = b"truefa"
    assert [bits(row) for row in masks.mask[:6]] == [
        {t, f},
        {r},
        {u},
        {e},
        {t, f},
        {a, FIRST_LONGER + 9},
    ]
    logits = torch.zeros(11, vocabulary().width)
    masks.apply(logits)
    assert torch.equal(logits[0], torch.zeros(vocabulary().width))
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == sorted([f, t])
    assert torch.isfinite(logits[8:]).all()
    part = torch.zeros(2, vocabulary().width)
    masks.apply(part, first_row=2)
    assert torch.isfinite(part).nonzero().tolist() == [[0, r], [1, u]]


def test_a_matcher_that_breaks_down_takes_no_other_with_it():
    class Broken:
        complete = False

        def fill(self, row):
            raise ParserFault("out of fuel")

        def count_legal(self, tokens):
            return 0

    good = schema_matcher("xgrammar", {"type": "null"})
    entries = [
        MaskEntry(matcher=Matcher(Broken(), vocabulary()), first_row=0),
        MaskEntry(matcher=good, first_row=1),
    ]
    masks = fill_masks(entries, 2)
    assert list(masks.faults) == [0]
    assert "out of fuel" in masks.faults[0].message
    assert masks.mask_rows.tolist() == [-1, 1]
    assert bits(masks.mask[1]) == {ord("n")}


def test_rows_of_narrower_vocabularies_allow_no_token_of_a_wider_one():
    wide = vocabulary().extended({vocabulary().width + 40: b"ab"})
    made = create("llguidance", wide)
    grammar = made.load(made.compile(GrammarKind.REGEX, "[a-z]*", {}))
    entries = [
        MaskEntry(matcher=matcher("xgrammar", GrammarKind.REGEX, "[a-z]*"), first_row=0),
        MaskEntry(matcher=Matcher(grammar.parser(), wide), first_row=1),
    ]
    masks = fill_masks(entries, 2)
    narrow, broad = (bits(row) for row in masks.mask)
    assert broad - narrow == {vocabulary().width + 40}


def test_a_step_without_constraints_has_no_masks():
    masks = fill_masks([], 4)
    assert masks.mask_rows.tolist() == [-1] * 4
    logits = torch.zeros(4, 10)
    masks.apply(logits)
    assert torch.equal(logits, torch.zeros(4, 10))


def test_filling_in_a_thread_while_another_walks_gives_the_same_rows():
    """Sequences of one grammar share it; the rows of one must not depend on what others do."""
    for name in BACKENDS:
        made = schema_matcher(name, {"type": "array", "items": {"type": "string"}})
        for byte in b'["a","':
            made.accept(byte)
        expected, other, stop = allowed(made), made.copy(), threading.Event()

        def walk(other=other, stop=stop):
            row = np.zeros(vocabulary().num_words, np.int32)
            while not stop.is_set():
                other.accept(FIRST_LONGER + 3)
                other.fill(row)
                other.rollback(1)

        thread = threading.Thread(target=walk)
        thread.start()
        try:
            assert all(allowed(made) == expected for _ in range(300))
        finally:
            stop.set()
            thread.join()
