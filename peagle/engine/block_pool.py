"""Blocks of the paged KV cache: who holds them, and which of them hold the beginning of a text seen before."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct


class BlockPool:
    """Reference-counted blocks 1 .. `num_blocks`; block 0, the null block, is never given out.

    A full block can be found again by its key: a 128-bit hash of the key of the block before it, its own tokens and ONE
    LOOK-AHEAD TOKEN, since the drafter's row at position i holds token i + 1. A block nobody holds stays findable until
    it is needed for something else; the least recently used goes first.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._pack = Struct(f"{block_size + 1}i").pack
        self._references = [0] * (num_blocks + 1)
        self._keys: dict[int, bytes] = {}  # of registered blocks, doubles included
        self._found: dict[bytes, int] = {}  # one block for each key
        self._blank = list(range(num_blocks, 0, -1))  # unreferenced, nothing to find in them
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced but findable, least recently used first

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, findable ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, in [0, 1]."""
        return 1 - self.num_free / self.num_blocks

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks for writing, or None (and nothing) when fewer are free."""
        if count > self.num_free:
            return None
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """The longest findable prefix in whole blocks, with a reference taken to each of them.

        Every block needs its look-ahead token, so at least one token of `token_ids` is left to compute.
        """
        blocks: list[int] = []
        while (key := self.next_key(token_ids, blocks)) and (block := self._found.get(key)):  # block 0 is never found
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def next_key(self, token_ids: Sequence[int], matched: Sequence[int]) -> bytes | None:
        """Key of the block that would make `matched`, a held match of `token_ids`, longer; None if none can."""
        parent = self._keys[matched[-1]] if matched else b""
        return self._key(parent, token_ids, len(matched)) if len(matched) < self._num_findable(token_ids) else None

    def can_find(self, key: bytes | None) -> bool:
        """Whether a block has this key."""
        return key in self._found

    def register(
        self, token_ids: Sequence[int], blocks: Sequence[int], num_computed: int, num_registered: int = 0
    ) -> int:
        """Make findable what of `blocks` is computed and has its look-ahead token; returns how many of them are done.

        The first `num_computed` tokens are in the cache. `num_registered` is what the last call for these blocks
        returned, or the length of the match they begin with.
        """
        end = min(num_computed // self.block_size, self._num_findable(token_ids))
        if end <= num_registered:
            return num_registered
        key = self._keys[blocks[num_registered - 1]] if num_registered else b""
        for i in range(num_registered, end):
            key = self._keys[blocks[i]] = self._key(key, token_ids, i)
            self._found.setdefault(key, blocks[i])
        return end

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a request's blocks; of those nobody holds, the last is evicted first."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released but not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._retire(block)

    def _num_findable(self, token_ids: Sequence[int]) -> int:
        """How many blocks of a text have all their tokens and the look-ahead token."""
        return (len(token_ids) - 1) // self.block_size if self.prefix_caching else 0

    def _key(self, parent: bytes, token_ids: Sequence[int], index: int) -> bytes:
        """Key of block `index` of a text whose block before it has the key `parent`."""
        first = index * self.block_size
        return blake2b(parent + self._pack(*token_ids[first : first + self.block_size + 1]), digest_size=16).digest()

    def _retire(self, block: int) -> None:
        """Keep an unreferenced block findable unless another one has its key."""
        key = self._keys.get(block)
        if key is not None and self._found.setdefault(key, block) == block:
            self._cached[block] = None
        else:
            self._keys.pop(block, None)
            self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._found[self._keys.pop(block)]
        return block
