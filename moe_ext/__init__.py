"""moe_ext: the communication side of sparse training, for CPU and CUDA."""

from moe_ext import ops
from moe_ext._info import info
from moe_ext._version import __version__

__all__ = ["__version__", "info", "ops"]
