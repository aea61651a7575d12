"""One file per operation: the torch twin `*_ref` that reads like the formula, and whatever is faster behind it."""
