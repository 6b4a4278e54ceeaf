"""Slow, obvious formulas in plain PyTorch: the oracle of the tests and the reading copy of the mathematics."""

from moe_ext.reference.permutation import permute_tokens, unpermute_tokens

__all__ = ["permute_tokens", "unpermute_tokens"]
