from hypothesis import given, settings
from hypothesis import strategies as st

from plait.platform.kv.pool import BlockPool
from plait.platform.kv.prefix import find_prefix

BLOCK_SIZE = 2


def longest(windows, available, num_own, num_blocks):
    """By definition: try every length, look at every position that its next row sees."""
    for length in range(num_blocks, num_own, -1):
        position = length * BLOCK_SIZE
        if all(
            seen // BLOCK_SIZE in available[g]
            for g, window in enumerate(windows)
            for seen in range(0 if window is None else max(0, position - window + 1), position)
        ):
            return length
    return None


@settings(max_examples=400, deadline=None)
@given(
    windows=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3),
    num_blocks=st.integers(0, 9),
    num_own=st.integers(0, 3),
    data=st.data(),
)
def test_finds_the_longest_prefix_valid_in_all_groups(windows, num_blocks, num_own, data):
    keys = [bytes([i]) for i in range(num_blocks)]
    pools, own, available = [], [], []
    for window in windows:
        pool = BlockPool(2 * num_blocks + 5)
        held = [pool.take() for _ in range(num_own)]
        if window is not None:
            held[: data.draw(st.integers(0, num_own))] = []
            held = [0] * (num_own - len(held)) + held
        found = {i for i, block in enumerate(held) if block}
        for i in data.draw(
            st.sets(st.sampled_from(range(num_blocks))) if num_blocks else st.just([])
        ):
            pool.publish(pool.take(), keys[i])
            found.add(i)
        pools.append(pool)
        own.append(held)
        available.append(found)
    tables = find_prefix(pools, windows, BLOCK_SIZE, keys, own)
    expected = longest(windows, available, num_own, num_blocks)
    assert (tables and len(tables[0])) == expected
    for g, table in enumerate(tables or []):
        window, position = windows[g], expected * BLOCK_SIZE
        first = 0 if window is None else max(0, position - window + 1) // BLOCK_SIZE
        for i, block in enumerate(table):
            mine = own[g][i] if i < num_own else 0
            assert block == (0 if i < first else mine or pools[g].find(keys[i]))
