"""Converts DeepSpeed's configuration to objects of moe_ext and torch."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from moe_ext._checks import check_rule
from moe_ext.comm.groups import world_size
from moe_ext.distributed.clipping import GradScaler
from moe_ext.distributed.mesh import MoEMesh
from moe_ext.distributed.placement import expert_param_groups
from moe_ext.optim import LAMB, OneBitAdam, OneBitLamb, ZeroOneAdam, param_groups

_OP = "from_ds_config"
# DeepSpeed also accepts "bfp16".
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "bfp16": torch.bfloat16,
}
_COMPRESSED: dict[str, type[Optimizer]] = {
    "onebitadam": OneBitAdam,
    "onebitlamb": OneBitLamb,
    "zerooneadam": ZeroOneAdam,
}
# Optimizers by DeepSpeed's names, in lower case.
_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adam": torch.optim.AdamW,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "lamb": LAMB,
    **_COMPRESSED,
}
# DeepSpeed's defaults that differ from those of the classes.
_DEFAULTS = {
    "adam": {"weight_decay": 0.0},
    "adamw": {"weight_decay": 0.0},
    "lamb": {"weight_decay": 0.0, "eps": 1e-8},
}
# Keys that change DeepSpeed's speed or its log, but no result.
_IGNORED = {
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "moe.enabled"),
    *("prescale_gradients", "gradient_predivide_factor", "optimizer.legacy_fusion"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("optimizer.params.torch_adam", "optimizer.params.fused", "fp16.auto_cast"),
    *("fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale"),
    *("zero_optimization.allgather_partitions", "zero_optimization.allgather_bucket_size"),
    *("zero_optimization.overlap_comm", "zero_optimization.reduce_scatter"),
    *("zero_optimization.reduce_bucket_size", "zero_optimization.contiguous_gradients"),
    *("zero_optimization.round_robin_gradients", "zero_optimization.sub_group_size"),
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.ignore_unused_parameters",
}
_ADVICE = {
    "scheduler": "use one of torch.optim.lr_scheduler",
    "amp": "use 'bf16' or 'fp16'",
    "flops_profiler": "use torch.profiler",
    "activation_checkpointing": "wrap blocks by torch's checkpoint_wrapper",
    "zero_optimization.offload_optimizer": "use fully_shard's offload_policy",
    "zero_optimization.offload_param": "use fully_shard's offload_policy",
    "compression_training": "it is no part of training with moe_ext",
}
_ZERO_PLUS_PLUS = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
)


@dataclass(frozen=True)
class DSConfig:
    """Settings of a DeepSpeed configuration.

    Attributes:
        micro_batch_size: number of samples of a micro-batch on one rank.
        accumulation_steps: number of micro-batches of a step.
        mesh_sizes: arguments of `MoEMesh`.
        zero_stage: 0 to 3.
        dtype: dtype of the forward pass; the optimizer's weights are float32.
        communication_dtype: dtype of gradients in messages; None keeps their own dtype.
        max_grad_norm: limit of the gradient norm; None for no clipping.
        zero_plus_plus: arguments of `moe_ext.compression.zero_plus_plus`; call it if any is set.
        loss_scale: options of `distributed.GradScaler`; None without float16.
        optimizer_class: class of the optimizer; None if the configuration has no optimizer.
        optimizer_options: arguments of the optimizer.
    """

    micro_batch_size: int
    accumulation_steps: int
    mesh_sizes: dict[str, Any]
    zero_stage: int = 0
    dtype: torch.dtype = torch.float32
    communication_dtype: torch.dtype | None = None
    max_grad_norm: float | None = None
    zero_plus_plus: dict[str, Any] = field(default_factory=dict)
    loss_scale: dict[str, Any] | None = None
    optimizer_class: type[Optimizer] | None = None
    optimizer_options: dict[str, Any] = field(default_factory=dict)

    def mesh(self) -> MoEMesh:
        """Make the mesh; collective over all ranks."""
        return MoEMesh(**self.mesh_sizes)

    def fsdp_options(self) -> dict[str, Any]:
        """Return options of `moe_ext.distributed.fully_shard` for stages 2 and 3."""
        # torch's FSDP takes a second to import, so the import is local.
        from torch.distributed.fsdp import MixedPrecisionPolicy

        low = None if self.dtype == torch.float32 else self.dtype
        reduced = self.communication_dtype or (low and torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced)
        return {"reshard_after_forward": self.zero_stage == 3, "mp_policy": policy}

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context for forward passes in `dtype`; without effect for stages 2 and 3."""
        if self.dtype == torch.float32 or self.zero_stage > 1:
            return contextlib.nullcontext()
        return torch.autocast(device_type, self.dtype)

    def grad_scaler(self, device_type: str) -> GradScaler:
        """Make the scaler of the loss, which is enabled only for float16."""
        options = self.loss_scale or {"enabled": False}
        return GradScaler(device_type, **options)

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """Make the optimizer; with stage 1, sharded ones for dense groups and plain for experts.

        Args:
            model: the model after `fully_shard` and `to`, equal on all ranks, which call this
                together.

        Raises:
            ValueError: the configuration has no optimizer.
        """
        cls, options = self.optimizer_class, self.optimizer_options
        if cls is None:
            raise ValueError(f"{_OP}: expected the configuration to have 'optimizer', got none")
        groups = expert_param_groups(model)
        if cls in (LAMB, *_COMPRESSED.values()):
            # In DeepSpeed each expert is a tensor of its own, with its own norm and messages.
            # These groups treat stacked experts in the same way.
            groups = param_groups(model, process_groups=cls is not LAMB)
            for group in groups:
                group["params"] = [parameter for _, parameter in group["params"]]
                # `param_groups` sets options for biases and norms, which DeepSpeed treats like any
                # other tensor.
                group.pop("weight_decay", None)
                group.pop("adapt", None)
        if self.zero_stage != 1:
            return [cls(groups, **options)]
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return [
            ZeroRedundancyOptimizer(group["params"], cls, **options)
            if group["name"].startswith("dense")
            else cls([group], **options)
            for group in groups
        ]


def from_ds_config(config: Mapping[str, Any]) -> DSConfig:
    """Read a DeepSpeed configuration, and refuse settings without a counterpart.

    Keys that change only speed are ignored with a warning. Two keys are added to DeepSpeed's:
    `{"moe": {"ep_size": n}}` is the number of ranks that share experts, which DeepSpeed takes from
    its layers, and `{"pipeline": {"stages": n}}` is the number of stages.

    Args:
        config: the argument of `deepspeed.initialize(config=)`, read from its JSON file.

    Returns:
        The settings, for the ranks of this job.

    Raises:
        ValueError: a key is unknown or has no counterpart; a value is out of range or "auto"; or
            batch sizes do not fit each other and the number of ranks. The message names the key.
    """
    left = _Keys(config)
    zero = left.section("zero_optimization")
    stage = zero.number("stage", 0)
    name = "zero_optimization.stage"
    check_rule(_OP, name, stage, "0, 1, 2 or 3", stage in (0, 1, 2, 3))
    plus = {name: zero.take(name) for name in _ZERO_PLUS_PLUS if name in zero.left}
    zero.end()
    sizes = {
        "cp": max(left.number("sequence_parallel_size", 1), 1),
        "tp": _only(left.section("tensor_parallel"), "autotp_size"),
        "pp": _only(left.section("pipeline"), "stages"),
        "ep": _only(left.section("moe"), "ep_size"),
    }
    rest, ranks = sizes["cp"] * sizes["tp"] * sizes["pp"], world_size()
    if ranks % rest:
        raise ValueError(
            f"{_OP}: expected sequence_parallel_size * tensor_parallel.autotp_size * "
            f"pipeline.stages to divide the number of ranks, {ranks}, got {rest}"
        )
    micro, passes = _batches(left, ranks // rest)
    dtype, loss_scale = _precision(left)
    communication = left.take("communication_data_type", None)
    fits, rule = communication in (None, *_DTYPES), f"one of {sorted(_DTYPES)}"
    check_rule(_OP, "communication_data_type", communication, rule, fits)
    reduced = None if communication is None else _DTYPES[communication]
    clipping = left.number("gradient_clipping", 0.0)
    name, cls, options = _optimizer(left)
    if name in _COMPRESSED:
        rule = (
            f"0 for optimizer.type {name!r}, which sends compressed moments in the place of "
            "gradients"
        )
        check_rule(_OP, "zero_optimization.stage", stage, rule, stage == 0)
        # A compressed optimizer gets gradients that are not averaged over ranks, so it has to clip
        # by itself.
        if clipping:
            options.setdefault("max_grad_norm", clipping)
        clipping = 0.0
        options["communication_data_type"] = reduced
    left.end()
    return DSConfig(
        micro,
        passes,
        {"dp": ranks // rest, **sizes},
        stage,
        dtype,
        reduced,
        clipping or None,
        plus,
        loss_scale,
        cls,
        options,
    )


class _Keys:
    """A section of the configuration. Reading a key removes it; `end` refuses remaining keys."""

    def __init__(self, values: Any, path: str = "") -> None:
        fits = isinstance(values, Mapping)
        check_rule(_OP, path.rstrip(".") or "config", values, "a dict", fits)
        self.left, self._path = dict(values), path

    def take(self, key: str, default: Any = None) -> Any:
        value = self.left.pop(key, default)
        if value == "auto":
            raise ValueError(
                f"{_OP}: expected {self._path}{key} to be a value, got 'auto', which a Trainer of "
                "transformers fills in"
            )
        return value

    def number(self, key: str, default: float) -> Any:
        value = self.take(key, default)
        whole = isinstance(default, int)
        is_number = isinstance(value, Integral if whole else Real)
        is_number = is_number and not isinstance(value, bool)
        rule = "a whole number, at least 0" if whole else "a number, at least 0"
        check_rule(_OP, f"{self._path}{key}", value, rule, is_number and value >= 0)
        return int(value) if whole else value

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self.take(key, default)
        check_rule(_OP, f"{self._path}{key}", value, "true or false", isinstance(value, bool))
        return value

    def option(self, key: str, default: object) -> Any:
        """Read an argument of an optimizer, whose type must be that of its default."""
        if isinstance(default, bool):
            return self.flag(key, default)
        if isinstance(default, int | float):
            return self.number(key, float(default))
        return self.take(key)

    def section(self, key: str) -> _Keys:
        return _Keys(self.take(key, {}), f"{self._path}{key}.")

    def end(self) -> None:
        """Raise ValueError for remaining keys, except those that change no result."""
        ignored = []
        for key, value in self.left.items():
            path = f"{self._path}{key}"
            if path in _IGNORED:
                ignored.append(path)
                continue
            # A section that is switched off has no effect.
            if isinstance(value, Mapping) and value.get("enabled") is False:
                continue
            advice = _ADVICE.get(path, "leave it out if it may be without effect")
            raise ValueError(
                f"{_OP}: expected a key that has a meaning here, got {path!r}; {advice}"
            )
        if ignored:
            warnings.warn(f"{_OP}: {', '.join(ignored)} ignored, no results change", stacklevel=4)


def _only(section: _Keys, key: str) -> int:
    """Return the size of a section that has a single key; 1 without the key."""
    size: int = section.number(key, 1)
    section.end()
    return max(size, 1)


def _batches(left: _Keys, num_data: int) -> tuple[int, int]:
    """Return the micro-batch size and the micro-batches per step, by DeepSpeed's rules."""
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    whole, micro, passes = (left.number(name, 0) for name in names)
    if not whole and not micro:
        raise ValueError(f"{_OP}: expected {names[0]} or {names[1]} to be given, got neither")
    if not micro:
        passes = passes or 1
        micro = whole // (passes * num_data)
    passes = passes or (whole // (micro * num_data) if whole and micro else 1)
    if micro < 1 or passes < 1 or (whole and whole != micro * passes * num_data):
        raise ValueError(
            f"{_OP}: expected {names[0]} to be {names[1]} * {names[2]} * {num_data}, the ranks "
            f"with data of their own, got {whole}, {micro} and {passes}"
        )
    return micro, passes


def _precision(left: _Keys) -> tuple[torch.dtype, dict[str, Any] | None]:
    """Return the dtype of the forward pass, and options of a scaler."""
    bf16, fp16 = left.section("bf16"), left.section("fp16")
    low, half = bf16.flag("enabled", False), fp16.flag("enabled", False)
    if low and half:
        raise ValueError(f"{_OP}: expected one of bf16.enabled and fp16.enabled, got both")
    static = fp16.number("loss_scale", 0.0)
    rule = "0, a scale that adapts itself"
    check_rule(_OP, "fp16.loss_scale", static, rule, not (half and static))
    power = fp16.number("initial_scale_power", 16)
    rule = "at most 127, the largest power of 2 in float32"
    check_rule(_OP, "fp16.initial_scale_power", power, rule, power <= 127)
    scale = {
        "init_scale": 2.0**power,
        "growth_interval": fp16.number("loss_scale_window", 1000),
    }
    bf16.end()
    fp16.end()
    dtype = torch.bfloat16 if low else torch.float16 if half else torch.float32
    return dtype, scale if half else None


def _optimizer(left: _Keys) -> tuple[str, type[Optimizer] | None, dict[str, Any]]:
    """Return the optimizer's name in lower case, its class and its arguments."""
    section = left.section("optimizer")
    kind = section.take("type")
    if kind is None:
        section.end()
        return "", None, {}
    name = str(kind).lower()
    rule = f"one of {sorted(_OPTIMIZERS)} in any case of letters"
    check_rule(_OP, "optimizer.type", kind, rule, name in _OPTIMIZERS)
    cls, keys = _OPTIMIZERS[name], section.section("params")
    section.end()
    # DeepSpeed's Adam is AdamW, unless `adam_w_mode` is false.
    if name == "adam" and not keys.flag("adam_w_mode", True):
        cls = torch.optim.Adam
    keys.left.pop("adam_w_mode", None)
    known = inspect.signature(cls).parameters
    named = [key for key in keys.left if key in known and key not in ("params", "group", "fused")]
    options = {key: keys.option(key, known[key].default) for key in named}
    keys.end()
    if "betas" in options:
        betas = options["betas"]
        fits = isinstance(betas, list | tuple) and len(betas) == 2
        check_rule(_OP, "optimizer.params.betas", betas, "two numbers", fits)
        options["betas"] = tuple(betas)
    return name, cls, {**_DEFAULTS.get(name, {}), **options}
