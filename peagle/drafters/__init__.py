"""Drafters: the P-EAGLE head, its files, and how a new one starts."""
