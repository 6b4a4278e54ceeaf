"""PowerSGD, which is not imported with the other codecs: torch's hook needs numpy."""

from moe_ext.compression.codecs.powersgd import PowerSGD

__all__ = ["PowerSGD"]
