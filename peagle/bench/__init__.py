"""Prompt sets, measurements and the result files every published number comes from."""
