"""How large an engine is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """Limits of a step and of a request, named as in `EngineConfig`, whose open one is settled."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_model_len: int
    context_remedy: str = ""  # what makes for more, where the KV cache is what limits it

    def blocks_for(self, positions: int) -> int:
        """KV cache blocks that hold so many positions, at most a full context."""
        return -(-min(positions, self.max_model_len) // self.block_size)
