"""Slow, obvious formulas in plain PyTorch: the tests' oracle, and the maths to read."""

from moe_ext.reference.permutation import permute_tokens, unpermute_tokens

__all__ = ["permute_tokens", "unpermute_tokens"]
