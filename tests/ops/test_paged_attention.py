import itertools
from dataclasses import dataclass

import pytest
import torch
from support import cpu_isa

from plait.platform.config import KV_SCALE_BYTES
from plait.platform.ops.kv_codes import from_codes, to_codes
from plait.platform.ops.paged_attention import (
    AttentionShape,
    example_attention,
    paged_attention,
    reference_paged_attention,
    tolerance,
)

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


# --- an oracle that knows no pages -----------------------------------------------------------


@dataclass
class Tokens:
    """One sequence before it is cut into blocks: q [n, Hq, D], k and v [n, Hkv, D].

    Where K and V are kept in whole numbers, `codes` are these, and k and v what they say.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    codes: tuple[torch.Tensor, torch.Tensor] | None = None


def make_tokens(length, heads, head_size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads

    def rows(count):
        return torch.randn(length, count, head_size, generator=generator).to(dtype)

    return Tokens(rows(num_heads), rows(num_kv_heads), rows(num_kv_heads))


def in_codes(tokens):
    codes = (to_codes(tokens.k), to_codes(tokens.v))
    return Tokens(tokens.q, *(from_codes(x) for x in codes), codes=codes)


def exact_attention(tokens, *, scale, window=None, softcap=None, sinks=None, ranges=()):
    """Every row of one sequence in fp64, [n, Hq, D]: sums of exponentials, no softmax."""
    q, k, v = (x.double().transpose(0, 1) for x in (tokens.q, tokens.k, tokens.v))
    shared_by = len(q) // len(k)
    k, v = (x[torch.arange(len(q)) // shared_by] for x in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = torch.ones_like(scores[0], dtype=torch.bool).tril()
    for start, end in ranges:
        seen[start:end, start:end] = True
    weights = scores.exp() * seen
    if window is not None:
        weights = weights.triu(1 - window)
    total = weights.sum(dim=2, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return (weights @ v / total).transpose(0, 1)


def in_pages(spans, *, block_size=16, window=None, seed=0, layers=3, layer=1):
    """Arguments of the op for spans (tokens, start, stop) of sequences.

    Whatever no row of a span may read is NaN: unused slots, blocks before the window (which are
    the null block in the table), later tokens of the sequence, other layers.
    """
    first = spans[0][0]
    dtype, (num_kv_heads, head_size) = first.k.dtype, first.k.shape[1:]
    if first.codes is not None:
        head_size += KV_SCALE_BYTES
    counts = [-(-stop // block_size) for _, _, stop in spans]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1
    page_shape = (len(order) + 1, layers, 2, num_kv_heads, block_size, head_size)
    if first.codes is None:
        pages = torch.full(page_shape, torch.nan, dtype=dtype)
    else:
        pages = torch.full(page_shape, -1, dtype=torch.int8)  # all ones are NaN as a scale
    table = torch.zeros(len(spans), max(counts) + 1, dtype=torch.int32)
    free = iter(order.tolist())
    for span, (tokens, start, stop) in enumerate(spans):
        oldest = 0 if window is None else max(0, start - window + 1)
        for index in range(counts[span]):
            block = next(free)
            if (index + 1) * block_size <= oldest:
                continue
            table[span, index] = block
            begin, end = max(oldest, index * block_size), min(stop, (index + 1) * block_size)
            slots = slice(begin - index * block_size, end - index * block_size)
            for half, rows in enumerate(tokens.codes or (tokens.k, tokens.v)):
                pages[block, layer, half, :, slots] = rows[begin:end].transpose(0, 1)
    query = torch.cat([tokens.q[start:stop] for tokens, start, stop in spans])
    query_start = torch.tensor([0, *(stop - start for _, start, stop in spans)]).cumsum(0)
    seq_lens = torch.tensor([stop for _, _, stop in spans], dtype=torch.int32)
    return query, pages, layer, table, query_start.to(torch.int32), seq_lens


def check(op, spans, *, block_size=16, window=None, softcap=None, sinks=None, ranges=()):
    """`ranges`: (span, start, end)."""
    scale = spans[0][0].q.shape[2] ** -0.5
    args = in_pages(spans, block_size=block_size, window=window)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    out = op(*args, **options, ranges=as_ranges(ranges))
    exact = torch.cat(
        [
            exact_attention(tokens, **options, ranges=[r[1:] for r in ranges if r[0] == span])[
                start:stop
            ]
            for span, (tokens, start, stop) in enumerate(spans)
        ]
    )
    assert out.dtype is args[0].dtype
    torch.testing.assert_close(out.double(), exact, **tolerance(out.dtype))


def as_ranges(ranges):
    return torch.tensor(ranges, dtype=torch.int32) if ranges else None


OPTIONS = {
    "plain": {},
    "window 1": {"window": 1},
    "window below a block": {"window": 7},
    "window at a block": {"window": 16},
    "window over tiles": {"window": 150},
    "soft cap": {"softcap": 2.0},
    "all": {"window": 40, "softcap": 5.0, "sinks": True},
    "sinks": {"sinks": True},
}


def options_of(name, num_heads):
    options = dict(OPTIONS[name])
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-3, 3, num_heads)
    return options


# --- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [1, 3, 8, 17, 40, 64, 80, 96, 256])
def test_every_head_size_is_right(isa, dtype, head_size):
    tokens = make_tokens(37, (4, 2), head_size, dtype)
    check(paged_attention, [(tokens, 36, 37), (tokens, 0, 37)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (9, 3), (5, 1), (8, 2), (50, 1)])
def test_every_grouping_of_heads_is_right(isa, dtype, heads):
    tokens = make_tokens(20, heads, 16, dtype)
    check(paged_attention, [(tokens, 19, 20), (tokens, 3, 10), (tokens, 0, 20)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("op", [paged_attention, reference_paged_attention])
def test_every_option_is_right_on_mixed_spans(isa, op, dtype, options):
    long, short = make_tokens(290, (6, 2), 24, dtype, 1), make_tokens(5, (6, 2), 24, dtype, 2)
    spans = [(long, 289, 290), (short, 0, 5), (long, 100, 233), (long, 126, 130), (short, 0, 1)]
    check(op, spans, **options_of(options, 6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("op", [paged_attention, reference_paged_attention])
def test_rows_of_a_range_see_all_of_it(isa, op, dtype, options):
    """Ranges over tiles and micro-kernels, at a span's start and end, behind it, and beside none.

    A window bounds what lies behind, never what lies ahead.
    """
    long, short = make_tokens(290, (6, 2), 24, dtype, 1), make_tokens(5, (6, 2), 24, dtype, 2)
    spans = [(long, 289, 290), (short, 0, 5), (long, 100, 280), (long, 0, 44), (short, 0, 4)]
    ranges = [(0, 3, 60), (1, 0, 5), (2, 20, 90), (2, 100, 103), (2, 110, 270), (2, 279, 280),
              (3, 17, 30), (3, 30, 44)]  # fmt: skip
    check(op, spans, ranges=ranges, **options_of(options, 6))


def test_a_range_gives_its_rows_the_same_bits_in_any_batch(isa):
    tokens = make_tokens(300, (6, 2), 24, torch.float32)
    options = {"scale": 0.2, "window": 90}
    alone = paged_attention(
        *in_pages([(tokens, 100, 260)]), **options, ranges=as_ranges([(0, 130, 240)])
    )
    beside = in_pages([(tokens, 0, 7), (tokens, 120, 241), (tokens, 5, 6)], seed=3)
    together = paged_attention(*beside, **options, ranges=as_ranges([(1, 130, 240)]))
    torch.testing.assert_close(together[7 : 7 + 121], alone[20:141], rtol=0, atol=0)


@pytest.mark.parametrize(
    "ranges",
    [[(0, 5, 5)], [(0, 0, 21)], [(1, 0, 2)], [(0, 4, 8), (0, 7, 9)], [(0, -1, 3)]],
    ids=["empty", "beyond the sequence", "of no span", "overlapping", "before the sequence"],
)
def test_impossible_ranges_are_refused(ranges):
    tokens = make_tokens(20, (2, 2), 8, torch.float32)
    with pytest.raises(RuntimeError, match="paged_attention: range"):
        paged_attention(*in_pages([(tokens, 0, 20)]), scale=1.0, ranges=as_ranges(ranges))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_lengths_around_blocks_and_tiles_are_right(isa, length, block_size):
    tokens = make_tokens(length, (2, 1), 8, torch.float32)
    check(
        paged_attention, [(tokens, length - 1, length), (tokens, 0, length)], block_size=block_size
    )


def test_a_sharp_maximum_in_any_tile_is_right(isa):
    for peak in (0, 100, 130, 259):
        tokens = make_tokens(260, (2, 1), 16, torch.float32)
        tokens.k[peak] *= 120
        check(paged_attention, [(tokens, 259, 260), (tokens, 200, 260)])


def test_sinks_that_outweigh_everything_or_nothing(isa):
    tokens = make_tokens(30, (2, 1), 16, torch.float32)
    check(paged_attention, [(tokens, 0, 30)], sinks=torch.tensor([60.0, -float("inf")]))


def test_no_spans_and_spans_without_rows(isa):
    shape = AttentionShape(spans=((0, 40), (2, 20), (0, 0)))
    args = example_attention(shape)
    out = paged_attention(*args, scale=0.1)
    torch.testing.assert_close(
        out, reference_paged_attention(*args, scale=0.1), **tolerance(out.dtype)
    )
    query, pages, layer, table, _, lens = args
    nothing = (query[:0], pages, layer, table[:0], torch.zeros(1, dtype=torch.int32), lens[:0])
    assert paged_attention(*nothing, scale=0.1).shape == (0, 9, 64)


def test_the_query_may_be_a_view_of_a_merged_projection(isa):
    query, *rest = example_attention(AttentionShape(spans=((5, 40), (1, 7))))
    merged = torch.randn(6, 15 * 64)
    merged.view(6, 15, 64)[:, :9] = query
    view = merged[:, : 9 * 64].view(6, 9, 64)
    assert not view.is_contiguous()
    assert torch.equal(
        paged_attention(view, *rest, scale=0.1), paged_attention(query, *rest, scale=0.1)
    )


def test_a_nan_reaches_its_own_rows_and_no_other(isa):
    tokens = make_tokens(50, (4, 2), 16, torch.float32)
    broken = make_tokens(50, (4, 2), 16, torch.float32, seed=1)
    broken.k[20] = torch.nan
    broken.v[30] = torch.nan
    args = in_pages([(tokens, 0, 50), (broken, 0, 50)])
    out = paged_attention(*args, scale=0.25)
    assert out[:70].isfinite().all()
    assert out[70:].isnan().all()


@pytest.mark.parametrize("op", [paged_attention, reference_paged_attention])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [1, 3, 17, 64, 80])
@pytest.mark.parametrize("options", OPTIONS)
def test_codes_are_right_with_every_option(isa, op, dtype, head_size, options):
    tokens = [in_codes(make_tokens(n, (6, 2), head_size, dtype, seed=n)) for n in (1, 140, 300)]
    spans = [(tokens[2], 290, 300), (tokens[0], 0, 1), (tokens[1], 100, 140), (tokens[2], 128, 129)]
    check(op, spans, **options_of(options, 6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_codes_have_the_same_bits_in_any_chunk_batch_and_block(isa, dtype):
    length = 200
    tokens = in_codes(make_tokens(length, (6, 2), 64, dtype))
    other = in_codes(make_tokens(90, (6, 2), 64, dtype, seed=1))
    whole = paged_attention(*in_pages([(tokens, 0, length)]), scale=0.2)
    for chunk, block_size in ((1, 16), (7, 5), (100, 1)):
        cuts = [*range(0, length, chunk), length]
        spans = [(other, 20, 90), *((tokens, a, b) for a, b in itertools.pairwise(cuts))]
        out = paged_attention(*in_pages(spans, block_size=block_size, seed=chunk), scale=0.2)
        assert torch.equal(out[70:], whole), f"chunk {chunk}, block size {block_size}"


# --- bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 20])
@pytest.mark.parametrize("options", ["plain", "window below a block", "window over tiles", "all"])
def test_a_row_has_the_same_bits_in_any_chunk_batch_and_block(isa, dtype, head_size, options):
    options = {"scale": 0.2, **options_of(options, 6)}
    window = options.get("window")
    length = 280
    tokens = make_tokens(length, (6, 2), head_size, dtype)
    others = [make_tokens(n, (6, 2), head_size, dtype, seed=n) for n in (1, 90, 300)]
    whole = paged_attention(*in_pages([(tokens, 0, length)], window=window), **options)

    for chunk, block_size in ((1, 16), (2, 5), (7, 16), (64, 16), (100, 1)):
        cuts = [*range(0, length, chunk), length]
        spans = [(tokens, a, b) for a, b in itertools.pairwise(cuts)]
        spans[1:1] = [(other, len(other.q) // 2, len(other.q)) for other in others]
        args = in_pages(spans, block_size=block_size, window=window, seed=chunk)
        starts = args[4].tolist()
        out = paged_attention(*args, **options)
        mine = [0, *range(1 + len(others), len(spans))]
        rows = torch.cat([out[starts[s] : starts[s + 1]] for s in mine])
        assert torch.equal(rows, whole), f"chunk {chunk}, block size {block_size}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(isa, dtype):
    spans = ((1, 500), (300, 420), (5, 77), *((1, 160),) * 8)
    args = example_attention(AttentionShape(spans=spans, dtype=dtype))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = paged_attention(*args, scale=0.125)
        for num_threads in (2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(paged_attention(*args, scale=0.125), alone)
    finally:
        torch.set_num_threads(before)


def test_strides_of_the_query_and_a_neighbour_of_nans_change_no_bit(isa):
    tokens, broken = (make_tokens(60, (6, 2), 32, torch.bfloat16, seed=s) for s in (0, 1))
    broken.k[:], broken.v[:] = torch.nan, torch.inf
    alone = paged_attention(*in_pages([(tokens, 10, 60)]), scale=0.1)
    args = in_pages([(broken, 0, 60), (tokens, 10, 60), (broken, 59, 60)])
    assert torch.equal(paged_attention(*args, scale=0.1)[60:110], alone)


# --- the op itself -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [(None, None, False), (8, 2.0, True)])
def test_torch_accepts_the_op(dtype, options):
    window, softcap, sinks = options
    args = example_attention(AttentionShape(spans=((1, 20), (3, 9)), dtype=dtype))
    torch.library.opcheck(
        torch.ops.plait.paged_attention,
        (*args, 0.1, window, softcap, torch.randn(9) if sinks else None),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(4, 9, 32)}, r"query must be \[T, Hq, D\].*it is \[4, 9, 32\]"),
        ({"query": torch.zeros(4, 8, 64)}, "8 query heads are no multiple of the 3 KV heads"),
        ({"query": torch.zeros(4, 9, 64).bfloat16()}, "query must be of the pages' dtype"),
        ({"query": torch.zeros(64, 9, 4).permute(2, 1, 0)}, "query must be dense along its last"),
        ({"layer": 2}, "layer 2 is not one of the 2 layers"),
        ({"block_table": torch.ones(2, 3).long()}, "block_table must be int32"),
        ({"block_table": torch.ones(3, 3).int()}, r"block_table must be \[S, B\]"),
        ({"block_table": torch.tensor([[1, 2], [3, 4]]).int()}, "span 0 .* needs 3 blocks"),
        ({"block_table": torch.tensor([[1, 2, 9], [4, 5, 6]]).int()}, "sees block 9 at place 2"),
        ({"block_table": torch.tensor([[0, 2, 3], [4, 5, 6]]).int()}, "sees block 0 .* null block"),
        ({"block_table": torch.tensor([[1, 2, 3], [-4, 5, 6]]).int()}, "span 1 sees block -4"),
        ({"query_start": torch.tensor([0, 1, 3]).int()}, "query_start must lead from 0 to the 4"),
        ({"query_start": torch.tensor([0, 5, 4]).int()}, "query_start falls at span 1"),
        ({"query_start": torch.tensor([0, 4]).int()}, r"query_start must be \[S \+ 1\]"),
        ({"seq_lens": torch.tensor([40, 2]).int()}, "span 1 has 3 rows, but seq_lens says 2"),
        ({"seq_lens": torch.tensor([40, 20])}, "seq_lens must be int32"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"scale": float("nan")}, "scale must be positive"),
        ({"window": 0}, "window must be at least 1"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"sinks": torch.zeros(3)}, r"sinks must be \[Hq\]"),
        (
            {"pages": torch.zeros(7, 2, 2, 3, 16, 64).half()},
            "pages must be float32, bfloat16 or int8",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, message):
    names = ("query", "pages", "layer", "block_table", "query_start", "seq_lens")
    args = dict(
        zip(names, example_attention(AttentionShape(spans=((1, 40), (3, 20)))), strict=True)
    )
    with pytest.raises(RuntimeError, match=r"plait::paged_attention: .*" + message):
        paged_attention(**({**args, "scale": 0.1} | change))


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    args = example_attention(AttentionShape(spans=((1, 4),)))
    monkeypatch.setenv("PLAIT_CPU_ISA", "mmx")
    with pytest.raises(RuntimeError, match="PLAIT_CPU_ISA=mmx is unknown: use generic, avx2"):
        paged_attention(*args, scale=0.1)
