"""A head as a program gives the bits of torch, and a round of drafts those of its passes."""

from dataclasses import replace

import pytest
import torch
from support.eagle_heads import HeadShape, head_tensors, write_head

from plait.platform.ops._native import has_kernels
from plait.speculative.eagle_config import read_head_config
from plait.speculative.eagle_head import EagleHead, HeadRows, HeadTarget
from plait.speculative.eagle_program import Followed, Starts, Threads
from plait.speculative.eagle_weights import Kept, load_weights

pytestmark = pytest.mark.skipif(not has_kernels(), reason="programs need the compiled kernels")

BLOCK_SIZE, NUM_BLOCKS = 4, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = {
    "plain": HeadShape(),
    "normed residual, qk norms, biases": HeadShape(
        norm_before_residual=True, model_type="qwen3", attention_bias=True
    ),
    "an odd width": HeadShape(hidden_size=44, head_size=10, intermediate_size=70),
}


def both(path, shape, dtype, kept=None):
    """The same head, run by torch and as a program of two threads."""
    directory = write_head(path, shape, head_tensors(shape, 4))
    config = read_head_config(directory)
    weights = load_weights(directory, config, DTYPES[dtype], kept or Kept(), lambda _ids: 1 / 0)
    target = HeadTarget(
        taps=(2, 3, 4),
        kv_dtype=dtype,
        num_positions=200,
        embed=lambda ids: torch.nn.functional.embedding(ids, weights.embed),
        threads=None,
    )
    heads = [
        EagleHead(config, weights, replace(target, threads=t)) for t in (None, Threads(count=2))
    ]
    for head in heads:
        head.allocate(NUM_BLOCKS, BLOCK_SIZE)
        head._pages.zero_()
    return heads


def rows_of(spans, width, dtype, seed=0):
    """Rows of spans (first position, count), each in blocks of its own."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(a, a + n) for a, n in spans])
    table = torch.arange(1, 1 + 12 * len(spans), dtype=torch.int32).view(-1, 12)
    blocks = torch.cat(
        [table[s, torch.arange(a, a + n) // BLOCK_SIZE] for s, (a, n) in enumerate(spans)]
    )
    counts = torch.tensor([0] + [n for _, n in spans])
    return HeadRows(
        hidden=torch.randn(len(positions), width, generator=generator).to(DTYPES[dtype]),
        token_ids=torch.randint(307, (len(positions),), generator=generator),
        positions=positions,
        query_start=counts.cumsum(0).int(),
        seq_lens=torch.tensor([a + n for a, n in spans], dtype=torch.int32),
        slot_mapping=blocks.long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        block_table=table,
    )


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_pass_gives_the_bits_of_torch_in_rows_and_pages(shape, dtype, bits, tmp_path):
    by_torch, by_program = both(tmp_path, shape, dtype, Kept(bits=bits, activations="int8"))
    for seed, spans in enumerate(([(0, 7), (0, 1), (0, 13)], [(7, 2), (1, 30), (13, 1)])):
        rows = rows_of(spans, shape.hidden_size, dtype, seed)
        assert torch.equal(by_program.forward(rows), by_torch.forward(rows))
    assert torch.equal(by_program._pages, by_torch._pages)
    assert by_torch._pages.any()


def drafted_by_passes(head, rows, starts):
    """Tokens and chances of each sequence, by `forward` and `logits`."""
    found = []
    for s in range(len(starts.hidden)):
        hidden, tokens, chances, reached = starts.hidden[s : s + 1], [], [], 1.0
        for depth in range(starts.depths[s]):
            if depth:
                position = torch.tensor([starts.positions[s] + depth - 1])
                block = rows.block_table[s, int(position) // BLOCK_SIZE].long()
                ids = torch.tensor(tokens[-1:])
                hidden = head.forward(
                    HeadRows(
                        hidden=hidden,
                        token_ids=ids if head.target_ids is None else head.target_ids[ids],
                        positions=position,
                        query_start=torch.tensor([0, 1], dtype=torch.int32),
                        seq_lens=(position + 1).int(),
                        slot_mapping=block * BLOCK_SIZE + position % BLOCK_SIZE,
                        block_table=rows.block_table[s : s + 1],
                    )
                )
            (logits,) = head.logits(hidden)
            tokens.append(int(logits.argmax()))
            chances.append(float(logits.double().softmax(-1)[tokens[-1]]))
            reached *= chances[-1]
            if depth + 1 >= starts.sure[s] and reached < starts.floor:
                break
        found.append((tokens, chances))
    return found


@pytest.mark.parametrize("known", [True, False], ids=["embeddings kept", "asked for"])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_going_along_gives_the_bits_of_torch_and_what_comes_next(
    shape, dtype, bits, known, tmp_path
):
    by_torch, by_program = both(tmp_path, shape, dtype, Kept(bits=bits, activations="int8"))
    spans = [(0, 7), (5, 1), (0, 13)]
    rows = rows_of(spans, shape.hidden_size, dtype)
    ids = [5] * 21 if by_torch.target_ids is None else by_torch.target_ids[:21].tolist()
    others = set(range(307)) - set(
        ids if by_torch.target_ids is None else by_torch.target_ids.tolist()
    )
    followed = Followed(
        taps=torch.randn(21, 3 * shape.target_hidden_size).to(DTYPES[dtype]),
        token_ids=ids if known or not others else [*ids[1:], min(others)],
        starts=[first for first, _ in spans],
        counts=[count for _, count in spans],
        block_table=rows.block_table,
        drafts=True,
    )
    wanted, found = by_torch.follow(followed), by_program.follow(followed)
    assert torch.equal(found.hidden, wanted.hidden)
    assert torch.equal(by_program._pages, by_torch._pages)
    logits = by_torch.logits(wanted.hidden)
    assert [token for token, _ in found.next] == logits.argmax(-1).tolist()
    chances = logits.double().softmax(-1).amax(-1).tolist()
    assert [chance for _, chance in found.next] == pytest.approx(chances, rel=1e-4)
    silent = by_program.follow(replace(followed, drafts=False))
    assert torch.equal(silent.hidden, found.hidden)
    assert not silent.next


@pytest.mark.parametrize("floor", [0.0, 0.02])
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [True, False], ids=["120 tokens", "whole vocabulary"])
def test_a_round_gives_what_its_passes_give(own, dtype, bits, floor, tmp_path):
    shape = HeadShape() if own else HeadShape(draft_vocab_size=307)
    by_torch, by_program = both(tmp_path, shape, dtype, Kept(bits=bits))
    rows = rows_of([(0, 7), (0, 1), (0, 13), (0, 9)], shape.hidden_size, dtype)
    ends = rows.query_start[1:].long() - 1
    starts = Starts(
        hidden=by_program.forward(rows)[ends],
        positions=rows.seq_lens.tolist(),
        depths=[3, 1, 8, 5],
        sure=[2, 1, 1, 1],
        first_tokens=[],
        first_chances=[],
        block_table=rows.block_table,
        floor=floor,
    )
    by_torch.forward(rows)
    assert by_program.drafts_greedily
    assert not by_torch.drafts_greedily
    drafted = by_program.draft(starts)
    wanted = drafted_by_passes(by_torch, rows, starts)
    for s, (tokens, chances) in enumerate(wanted):
        missing = drafted.token_ids.shape[1] - len(tokens)
        assert drafted.token_ids[s].tolist() == tokens + [-1] * missing
        assert drafted.chances[s, : len(tokens)].tolist() == pytest.approx(chances, rel=1e-4)
    assert torch.equal(by_program._pages, by_torch._pages)
    firsts = [int(tokens[0]) for tokens in drafted.token_ids]
    given = replace(starts, first_tokens=firsts, first_chances=drafted.chances[:, 0].tolist())
    again = by_program.draft(given)
    assert torch.equal(again.token_ids, drafted.token_ids)
    assert torch.equal(again.chances, drafted.chances)
    lengths = [len(tokens) for tokens, _ in wanted]
    assert drafted.num_rows == sum(lengths) - 4
    assert drafted.num_forwards == max(lengths) - 1
    if floor:
        assert lengths != starts.depths


def test_a_row_that_is_not_finite_ends_its_own_draft_alone(tmp_path):
    _, head = both(tmp_path, HeadShape(), "float32")
    rows = rows_of([(0, 3), (0, 3)], 64, "float32")
    starts = Starts(
        hidden=head.forward(rows)[[2, 5]],
        positions=rows.seq_lens.tolist(),
        depths=[4, 4],
        sure=[4, 4],
        first_tokens=[],
        first_chances=[],
        block_table=rows.block_table,
        floor=0.0,
    )
    starts.hidden[0] = torch.nan
    assert (head.draft(starts).token_ids >= 0).tolist() == [[False] * 4, [True] * 4]


WRONG = {
    "hidden": {"hidden": torch.zeros(2, 63)},
    "1 starts": {"positions": [3]},
    "a depth of 0": {"depths": [1, 0]},
    "3 starts, depths or sure ones": {"sure": [1, 1, 1]},
    "first tokens and their chances": {"first_tokens": [1], "first_chances": [0.5]},
    "there is no token 120": {"first_tokens": [1, 120], "first_chances": [0.5, 0.5]},
    "a block_table": {"block_table": torch.zeros(3, 2, dtype=torch.int32)},
    "position 48 lies beyond 12 blocks": {"positions": [48, 3]},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_fit_is_refused_before_it_is_read(words, tmp_path):
    _, head = both(tmp_path, HeadShape(), "float32")
    starts = Starts(
        hidden=torch.zeros(2, 64),
        positions=[3, 3],
        depths=[2, 2],
        sure=[2, 2],
        first_tokens=[],
        first_chances=[],
        block_table=rows_of([(0, 3), (0, 3)], 64, "float32").block_table,
        floor=0.0,
    )
    with pytest.raises(RuntimeError, match=words):
        head.draft(replace(starts, **WRONG[words]))
