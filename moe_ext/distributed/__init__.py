"""Process groups, token dispatch and gradient synchronisation."""

from moe_ext.distributed.dispatcher import (
    AllToAllDispatcher,
    DispatchMetadata,
    LocalDispatcher,
    TokenDispatcher,
)
from moe_ext.distributed.failures import RankFailureError

__all__ = [
    "AllToAllDispatcher",
    "DispatchMetadata",
    "LocalDispatcher",
    "RankFailureError",
    "TokenDispatcher",
]
