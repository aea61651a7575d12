"""Structured output: what a request asks for, and the grammars made of it. Only `grammars` needs the extra."""
