"""Optimizers for large batches, sharded parameters and stacked experts, some that compress."""

from moe_ext.optim.adafactor import Adafactor
from moe_ext.optim.cpu_adamw import CPUAdamW
from moe_ext.optim.demo import DeMo
from moe_ext.optim.groups import param_groups
from moe_ext.optim.lamb import LAMB
from moe_ext.optim.lars import LARS
from moe_ext.optim.local_steps import DiLoCo, MuLoCo, SparseLoCo
from moe_ext.optim.muon import Muon
from moe_ext.optim.one_bit_adam import OneBitAdam
from moe_ext.optim.one_bit_lamb import OneBitLamb
from moe_ext.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "LAMB",
    "LARS",
    "Adafactor",
    "CPUAdamW",
    "DeMo",
    "DiLoCo",
    "MuLoCo",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "SparseLoCo",
    "ZeroOneAdam",
    "param_groups",
]


def __dir__() -> list[str]:
    return __all__
