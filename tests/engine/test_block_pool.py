"""The block pool: what is held, what can be found, and that finding never gives anything but what was written."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from peagle.engine.block_pool import BlockPool

TEXT = list(range(10, 30))


def registered(pool: BlockPool, token_ids: list[int], num_computed: int | None = None) -> list[int]:
    """Blocks that hold `token_ids`, findable and held."""
    blocks = pool.allocate(-(-len(token_ids) // pool.block_size))
    assert blocks is not None
    pool.register(token_ids, blocks, len(token_ids) if num_computed is None else num_computed)
    return blocks


def found(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """A match, given back at once."""
    blocks = pool.match(token_ids)
    pool.release(blocks)
    return blocks


def test_all_blocks_but_the_null_block_are_given_out():
    pool = BlockPool(5, 4)
    assert pool.allocate(6) is None
    assert pool.num_free == 5
    blocks = pool.allocate(5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.usage) == (0, 1)
    assert pool.allocate(0) == []
    pool.release(blocks)
    assert (pool.num_free, pool.usage) == (5, 0)


def test_a_block_is_not_released_twice():
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="not held"):
        pool.release(blocks)


def test_a_match_needs_the_tokens_and_the_next_one():
    pool = BlockPool(8, 4)
    blocks = registered(pool, TEXT[:13])
    assert found(pool, TEXT[:13]) == blocks[:3]
    assert found(pool, TEXT[:12]) == blocks[:2]
    assert found(pool, TEXT[:9]) == blocks[:2]
    assert found(pool, TEXT[:8]) == blocks[:1]
    assert found(pool, TEXT[:4]) == []
    assert found(pool, []) == []
    assert found(pool, [*TEXT[:8], 0]) == blocks[:1]  # the token after the second block is another
    assert found(pool, [*TEXT[:3], 0, *TEXT[4:13]]) == []
    assert found(pool, TEXT[4:13]) == []  # same tokens, another place


@pytest.mark.parametrize(
    "known, computed, blocks", [(12, 12, 2), (13, 12, 3), (13, 11, 2), (20, 7, 1), (20, 0, 0), (9, 20, 2)]
)
def test_only_complete_blocks_are_registered(known: int, computed: int, blocks: int):
    pool = BlockPool(8, 4)
    held = registered(pool, TEXT[:known], computed)
    assert found(pool, TEXT) == held[:blocks]


def test_registering_goes_on_where_it_stopped():
    pool = BlockPool(8, 4)
    blocks, done = pool.allocate(5), 0
    for computed in range(20):
        done = pool.register(TEXT[: computed + 1], blocks, computed, done)
        assert done == computed // 4
        assert found(pool, TEXT) == blocks[:done]


def test_a_match_holds_its_blocks():
    pool = BlockPool(4, 4)
    pool.release(registered(pool, TEXT[:9]))
    assert pool.num_free == 4
    held = pool.match(TEXT[:9])
    assert pool.num_free == 2
    assert pool.match(TEXT[:9]) == held
    pool.release(held)
    assert pool.num_free == 2
    assert not set(pool.allocate(2)) & set(held)
    assert pool.allocate(1) is None


def test_least_recently_used_and_tails_go_first():
    pool = BlockPool(6, 4)
    old, new = registered(pool, TEXT[:9]), registered(pool, [*TEXT[10:18], 0])
    pool.release(old)
    pool.release(new)
    assert set(pool.allocate(2)) == {old[2], new[2]}  # nothing to find in these
    assert found(pool, TEXT[:9]) == old[:2]  # used: now younger than `new`
    assert pool.allocate(1) == [new[1]]
    assert pool.allocate(1) == [new[0]]
    assert pool.allocate(1) == [old[1]]
    assert found(pool, TEXT[:9]) == old[:1]


def test_a_double_takes_the_place_of_the_block_that_went():
    pool = BlockPool(5, 4)
    first, double = registered(pool, TEXT[:5]), registered(pool, TEXT[:5])
    assert found(pool, TEXT[:5]) == first[:1]
    pool.release(first)
    pool.allocate(pool.num_free)
    assert found(pool, TEXT[:5]) == []
    pool.release(double)
    assert found(pool, TEXT[:5]) == double[:1]


def test_what_would_make_a_match_longer():
    pool = BlockPool(8, 4)
    blocks = registered(pool, TEXT[:13], num_computed=5)
    match = pool.match(TEXT[:13])
    key = pool.next_key(TEXT[:13], match)
    assert not pool.can_find(key)
    pool.register(TEXT[:13], blocks, 8, 1)
    assert pool.can_find(key)
    assert pool.next_key(TEXT[:8], match) is None  # nothing can
    assert not pool.can_find(None)


def test_without_prefix_caching_nothing_is_found():
    pool = BlockPool(8, 4, prefix_caching=False)
    pool.release(registered(pool, TEXT))
    assert pool.match(TEXT) == []
    assert pool.num_free == 8


class PoolMachine(RuleBasedStateMachine):
    """Holders of texts over two tokens, in a pool too small for them, against a record of what each block holds."""

    @initialize(num_blocks=st.integers(1, 8), block_size=st.integers(1, 3))
    def start(self, num_blocks: int, block_size: int):
        self.pool, self.size = BlockPool(num_blocks, block_size), block_size
        self.holders: list[tuple[list[int], list[int], int]] = []  # text, blocks, registered
        self.content: dict[int, list[int]] = {}  # of each block: all tokens up to its look-ahead

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, text: list[int]):
        matched = self.pool.match(text)
        assert len(matched) * self.size < len(text)
        for i, block in enumerate(matched):
            assert self.content[block] == text[: (i + 1) * self.size + 1]
        fresh = self.pool.allocate(-(-len(text) // self.size) - len(matched))
        if fresh is None:
            return self.pool.release(matched)
        assert not set(fresh) & self.held()
        for i, block in enumerate(fresh, start=len(matched)):
            self.content[block] = text[: (i + 1) * self.size + 1]
        self.holders.append((text, matched + fresh, len(matched)))

    @rule(data=st.data())
    def advance(self, data: st.DataObject):
        if self.holders:
            at = data.draw(st.integers(0, len(self.holders) - 1))
            text, blocks, done = self.holders[at]
            computed = data.draw(st.integers(done * self.size, len(text)))
            self.holders[at] = (text, blocks, self.pool.register(text, blocks, computed, done))

    @rule(data=st.data())
    def end(self, data: st.DataObject):
        if self.holders:
            self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))[1])

    def held(self) -> set[int]:
        return {block for _, blocks, _ in self.holders for block in blocks}

    @invariant()
    def counts(self):
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_blocks - len(self.held())
            assert self.held() <= set(range(1, self.pool.num_blocks + 1))

    def teardown(self):
        if hasattr(self, "pool"):
            for _, blocks, _ in self.holders:
                self.pool.release(blocks)
            assert self.pool.usage == 0
            assert sorted(self.pool.allocate(self.pool.num_blocks)) == list(range(1, self.pool.num_blocks + 1))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
