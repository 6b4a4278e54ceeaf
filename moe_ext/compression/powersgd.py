"""PowerSGD, apart from the other codecs because torch's hook needs numpy."""

from moe_ext.compression.codecs.powersgd import PowerSGD

__all__ = ["PowerSGD"]
