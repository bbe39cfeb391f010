import torch

from plait.platform.ops.huge_pages import WORTH_IT, huge_memory, lasting_memory

SIZES = (0, 1, 63, 64, 65, 4096, 1_000_000, 3_000_000, WORTH_IT - 1, WORTH_IT, WORTH_IT + 1)


def test_small_pieces_are_zero_and_of_their_own():
    pieces = [lasting_memory(size) for size in SIZES * 3]
    for number, piece in enumerate(pieces, 1):
        assert not piece.any()
        piece.fill_(number)
    for number, piece in enumerate(pieces, 1):
        assert piece.eq(number).all()


def test_pieces_have_storages_of_their_size_that_begin_with_a_line():
    for make in (huge_memory, lasting_memory):
        for size in SIZES:
            piece = make(size)
            assert piece.dtype == torch.uint8
            assert piece.untyped_storage().nbytes() == size
            assert piece.data_ptr() % 64 == 0


def test_pieces_outlive_each_other():
    kept = [lasting_memory(5_000_000).fill_(i) for i in range(1, 9)]
    del kept[::2]
    more = [lasting_memory(5_000_000) for _ in range(4)]
    assert not any(piece.any() for piece in more)
    assert [int(piece[-1]) for piece in kept] == [2, 4, 6, 8]


def test_a_shifted_piece_begins_so_far_behind_the_beginning_of_a_page():
    piece = huge_memory(WORTH_IT, 640)
    assert piece.data_ptr() % (2 << 20) == 640
    assert piece.untyped_storage().nbytes() == WORTH_IT
    assert not piece.any()
