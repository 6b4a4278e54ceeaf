"""The only file of this package that imports private names of torch."""

from __future__ import annotations

from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

__all__ = ["get_schedule_ops", "stage_backward_input", "stage_backward_weight"]
