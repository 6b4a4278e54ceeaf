"""Spares torch.compile timing its guards: it clears the caches first, for a tenth of a second."""

from torch._dynamo import guards

if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = lambda *args: 0.0
