"""Where a chunk may end, against a reading token by token."""

from hypothesis import given
from hypothesis import strategies as st

from plait.platform.scheduling.unbroken import cut, least, longest


def is_inside(spans, end):
    return any(begin < end < stop for begin, stop in spans)


@st.composite
def spans_of(draw):
    borders = draw(st.lists(st.integers(0, 30), unique=True, max_size=6).map(sorted))
    return tuple(zip(borders[::2], borders[1::2], strict=False))


@given(spans_of(), st.integers(0, 30), st.integers(1, 30))
def test_chunks_end_at_the_last_place_that_is_inside_no_span(spans, start, num_tokens):
    ends = [n for n in range(1, num_tokens + 1) if not is_inside(spans, start + n)]
    assert cut(spans, start, num_tokens) == max(ends, default=0)
    fewest = least(spans, start)
    assert fewest == min(n for n in range(1, 40) if not is_inside(spans, start + n))
    assert max(cut(spans, start, num_tokens), fewest) >= 1
    assert longest(spans) >= max((b - a for a, b in spans), default=1)
