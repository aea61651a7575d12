"""The speculative decoding engine: requests, paged KV cache, scheduler, the step, and `LLM` around them."""
