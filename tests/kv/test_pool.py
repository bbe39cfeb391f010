import pytest

from plait.platform.kv.pool import BlockPool


def test_blank_blocks_are_taken_before_those_that_keep_content():
    pool = BlockPool(4)
    a, b, c = (pool.take() for _ in range(3))
    pool.publish(b, b"b")
    for block in (b, a, c):
        pool.drop(block)
    assert {pool.take(), pool.take()} == {a, c}
    assert pool.find(b"b") == b
    assert pool.take() == b
    assert pool.find(b"b") is None


def test_content_is_forgotten_in_the_order_in_which_it_was_dropped():
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(3)]
    for block in blocks:
        pool.publish(block, bytes([block]))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.drop(block)
    pool.hold(blocks[1])  # used again, so now the latest
    pool.drop(blocks[1])
    assert [pool.take() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]


def test_the_first_block_published_under_a_key_stays_the_one_found():
    pool = BlockPool(3)
    a, b = pool.take(), pool.take()
    pool.publish(a, b"k")
    pool.publish(b, b"k")
    assert pool.find(b"k") == a
    assert pool.key(b) is None
    pool.drop(a)
    pool.drop(b)
    assert pool.take() == b
    assert pool.find(b"k") == a


def test_the_null_block_is_never_given_out():
    pool = BlockPool(5)
    assert sorted(pool.take() for _ in range(pool.num_free)) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_integrity_notices_each_kind_of_damage():
    def damaged(damage):
        pool = BlockPool(4)
        a, b = pool.take(), pool.take()
        pool.publish(a, b"k")
        pool.check_integrity({a: 1, b: 1})
        damage(pool, a)
        with pytest.raises(AssertionError):
            pool.check_integrity({a: 1, b: 1})

    damaged(lambda pool, a: pool.hold(a))
    damaged(lambda pool, a: pool.drop(a))
    damaged(lambda pool, a: pool.take())
    damaged(lambda pool, a: pool._free.update({a: None}))
    damaged(lambda pool, a: pool._by_key.clear())
    damaged(lambda pool, a: pool._free.popitem())
