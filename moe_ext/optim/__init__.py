"""Optimizers for large batches, sharded parameters and stacked experts, some that compress."""

from moe_ext.optim.adafactor import Adafactor
from moe_ext.optim.groups import param_groups
from moe_ext.optim.lamb import LAMB
from moe_ext.optim.lars import LARS

__all__ = ["LAMB", "LARS", "Adafactor", "param_groups"]
