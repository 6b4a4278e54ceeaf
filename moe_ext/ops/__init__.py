"""Operators, each also registered as ``torch.ops.moe_ext.<name>``."""

from moe_ext import _library

_library.load()

from moe_ext.ops.permutation import Permutation, permute_tokens, unpermute_tokens  # noqa: E402

__all__ = ["Permutation", "permute_tokens", "unpermute_tokens"]
