from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from plait.platform.batch import AdapterSegment, build
from plait.platform.core import (
    AdapterUse,
    ImageItem,
    Request,
    SamplingParams,
    Sequence,
    Span,
    StepPlan,
)

BLOCK_SIZE = 4


def make_span(start, num_known, drafts=(), *, samples=None, adapters=(), first_block=1, groups=2):
    length = start + num_known + len(drafts)
    prompt = tuple(100 * first_block + i for i in range(start + num_known))
    request = Request(
        request_id="r", prompt_token_ids=prompt, params=SamplingParams(), adapters=tuple(adapters)
    )
    sequence = Sequence(
        seq_id=0, request=request, index=0, arrival=0, tokens=list(prompt), max_total_tokens=999,
        seed=0,
    )  # fmt: skip
    num_blocks = -(-length // BLOCK_SIZE)
    tables = [tuple(first_block + 50 * g + i for i in range(num_blocks)) for g in range(groups)]
    return Span(
        sequence=sequence,
        start=start,
        num_tokens=num_known + len(drafts),
        num_samples=1 + len(drafts) if samples is None else samples,
        drafts=tuple(drafts),
        block_ids=tuple(tables),
    )


def plan_of(*spans):
    return StepPlan(step_id=1, spans=tuple(spans))


def use(generation, scale=1.0, active_from=0):
    return AdapterUse(generation=generation, scale=scale, active_from=active_from)


uses = st.builds(
    use, st.sampled_from("abc"), st.sampled_from([1.0, 0.5]), st.sampled_from([0, 0, 3, 12])
)
spans = st.lists(
    st.builds(
        make_span,
        start=st.integers(0, 13),
        num_known=st.integers(1, 9),
        drafts=st.lists(st.integers(900, 950), max_size=5),
        samples=st.none() | st.just(0),
        adapters=st.lists(uses, max_size=3),
        first_block=st.integers(1, 40),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(spans)
def test_every_row_is_where_a_row_by_row_reading_of_the_plan_puts_it(spans):
    batch = build(plan_of(*spans), BLOCK_SIZE)
    rows, sample_rows, sample_start, query_start = [], [], [0], [0]
    for span in spans:
        tokens = [*span.sequence.tokens, *span.drafts]
        for position in range(span.start, span.start + span.num_tokens):
            slots = [
                table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for table in span.block_ids
            ]
            rows.append((tokens[position], position, *slots))
        query_start.append(len(rows))
        sample_rows += range(len(rows) - span.num_samples, len(rows))
        sample_start.append(len(sample_rows))
    found = (batch.token_ids, batch.positions, *batch.slot_mapping)
    assert list(zip(*(array.tolist() for array in found), strict=True)) == rows
    assert batch.query_start.tolist() == query_start
    assert batch.seq_lens.tolist() == [span.start + span.num_tokens for span in spans]
    assert batch.sample_rows.tolist() == sample_rows
    assert batch.sample_start.tolist() == sample_start
    for g, table in enumerate(batch.block_tables):
        for row, span in zip(table.tolist(), spans, strict=True):
            blocks = list(span.block_ids[g])
            assert row == blocks + [0] * (len(row) - len(blocks))
    adapters = [[] for _ in rows]
    for segment in batch.adapter_segments:
        for row in range(segment.start, segment.end):
            adapters[row].append((segment.generation, segment.scale))
    assert adapters == [
        [
            (u.generation, u.scale)
            for u in span.sequence.request.adapters
            if position >= u.active_from
        ]
        for span in spans
        for position in range(span.start, span.start + span.num_tokens)
    ]


def test_arrays_have_the_documented_types():
    batch = build(plan_of(make_span(3, 1, [901])), BLOCK_SIZE)
    wide = [batch.token_ids, batch.positions, *batch.slot_mapping, batch.sample_rows]
    narrow = [batch.query_start, batch.seq_lens, *batch.block_tables, batch.sample_start]
    assert {array.dtype for array in [*wide, batch.image_rows]} == {np.dtype(np.int64)}
    assert {array.dtype for array in narrow} == {np.dtype(np.int32)}
    assert all(array.flags.c_contiguous for array in [*wide, *narrow])


def test_neighbouring_spans_of_one_adapter_are_one_segment():
    adapters = [[use("a")], [use("a")], [], [use("a")], [use("b")]]
    batch = build(plan_of(*(make_span(0, 2, adapters=a) for a in adapters)), BLOCK_SIZE)
    assert batch.adapter_segments == (
        AdapterSegment(0, 4, "a", 1.0),
        AdapterSegment(6, 8, "a", 1.0),
        AdapterSegment(8, 10, "b", 1.0),
    )


def test_a_plan_without_spans_is_an_empty_batch():
    batch = build(plan_of(), BLOCK_SIZE)
    assert batch.token_ids.size == batch.sample_rows.size == 0
    assert batch.query_start.tolist() == batch.sample_start.tolist() == [0]


def test_a_row_in_the_null_block_is_refused():
    span = make_span(3, 2)
    span = structs.replace(span, block_ids=((0, 0), span.block_ids[1]))
    with pytest.raises(ValueError, match="null block"):
        build(plan_of(span), BLOCK_SIZE)


def pictured(span, *items, **fields):
    """The span, of a prompt with images."""
    request = replace(span.sequence.request, images=items, **fields)
    span.sequence.request = request
    return span


def test_rows_of_images_and_spans_of_tokens_are_where_the_prompt_has_them():
    broken = ImageItem(key="a", start=2, num_tokens=7, embedded=((0, 3), (4, 3)), tensors={})
    whole = ImageItem(key="b", start=10, num_tokens=2, embedded=((0, 2),), tensors={})
    spans = ((2, 5), (6, 9), (10, 12))
    chunk = pictured(make_span(3, 8), broken, whole, spans=spans)  # positions 3 to 10
    batch = build(plan_of(make_span(0, 2), chunk), BLOCK_SIZE)
    assert batch.image_rows.tolist() == [2 + p - 3 for p in (3, 4, 6, 7, 8, 10)]
    assert batch.ranges.tolist() == [[1, 2, 5], [1, 6, 9], [1, 10, 12]]
    later = pictured(make_span(9, 1, [901]), broken, spans=((2, 9),))
    batch = build(plan_of(make_span(0, 2), later), BLOCK_SIZE)
    assert (len(batch.image_rows), len(batch.ranges)) == (0, 0)
    assert build(plan_of(chunk), BLOCK_SIZE, images=False).image_rows.tolist() == []


def test_positions_of_a_grid_come_from_the_request_and_go_on_behind_its_prompt():
    grid = np.arange(18, dtype=np.int32).reshape(3, 6) * 10
    item = ImageItem(key="a", start=1, num_tokens=2, embedded=((0, 2),), tensors={})
    known = make_span(4, 2, [901, 902])  # the prompt's last two, and drafts
    with_grid = pictured(known, item, positions=grid.tobytes(), position_delta=-3)
    batch = build(plan_of(make_span(7, 2), with_grid), BLOCK_SIZE)
    plain = [7, 8]
    assert batch.positions.tolist() == [[*plain, *row[4:], 3, 4] for row in grid.tolist()]
    assert batch.seq_lens.tolist() == [9, 8]
    alone = build(plan_of(make_span(4, 2, [901, 902])), BLOCK_SIZE)
    assert batch.slot_mapping[0][2:].tolist() == alone.slot_mapping[0].tolist()
