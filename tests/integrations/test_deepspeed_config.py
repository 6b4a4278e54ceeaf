"""DeepSpeed's configurations: what each key becomes, and which are refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import moe_ext
from moe_ext import distributed as md
from moe_ext.optim import LAMB, OneBitAdam, OneBitLamb, ZeroOneAdam
from moe_ext.testing import spawn_ranks

BATCH = {"train_micro_batch_size_per_gpu": 4}
ADAM = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.9]}}


def test_all_that_is_taken():
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": ADAM,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "gradient_clipping": 1.5,
        "communication_data_type": "fp32",
        "sequence_parallel_size": 1,
        "moe": {"ep_size": 1},
        "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
    }
    found = md.from_ds_config(config)
    assert (found.micro_batch_size, found.accumulation_steps) == (4, 3)
    assert found.mesh_sizes == {"dp": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    assert repr(found.mesh()) == repr(md.MoEMesh())
    assert (found.zero_stage, found.dtype) == (3, torch.bfloat16)
    assert (found.communication_dtype, found.max_grad_norm) == (torch.float32, 1.5)
    assert found.zero_plus_plus == {"zero_quantized_weights": True}
    options = found.fsdp_options()
    assert options["reshard_after_forward"]
    assert options["mp_policy"].param_dtype == torch.bfloat16
    assert options["mp_policy"].reduce_dtype == torch.float32
    assert not found.grad_scaler("cpu").is_enabled()
    (optimizer,) = found.optimizers(nn.Linear(2, 2))
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.8, 0.9), 0.0)


def test_numbers_of_numpy_are_taken():
    """Numbers of numpy, as a search over options gives them."""
    config = {
        "train_batch_size": np.int64(8),
        "train_micro_batch_size_per_gpu": np.int32(4),
        "gradient_clipping": np.float32(1.5),
        "zero_optimization": {"stage": np.int64(0)},
        "fp16": {"enabled": True, "initial_scale_power": np.int64(8)},
        "optimizer": {"type": "Adam", "params": {"lr": np.float32(0.5)}},
    }
    found = md.from_ds_config(config)
    assert (found.micro_batch_size, found.accumulation_steps) == (4, 2)
    assert (found.max_grad_norm, found.zero_stage) == (1.5, 0)
    assert found.grad_scaler("cpu").get_scale() == 256.0
    (optimizer,) = found.optimizers(nn.Linear(2, 2))
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("kind", "params", "cls", "options"),
    [
        ("AdamW", {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("Lamb", {"max_coeff": 5.0}, LAMB, {"max_coeff": 5.0, "eps": 1e-8, "weight_decay": 0.0}),
        ("OneBitAdam", {"freeze_step": 7}, OneBitAdam, {"freeze_step": 7, "max_grad_norm": 2.0}),
        ("OneBitLamb", {"coeff_beta": 0.8}, OneBitLamb, {"coeff_beta": 0.8}),
        ("ZeroOneAdam", {"var_freeze_step": 9}, ZeroOneAdam, {"var_freeze_step": 9}),
    ],
)
def test_optimizers(kind, params, cls, options):
    is_compressed = cls in (OneBitAdam, OneBitLamb, ZeroOneAdam)
    config = {**BATCH, "optimizer": {"type": kind, "params": params}, "gradient_clipping": 2.0}
    found = md.from_ds_config({**config, "communication_data_type": "fp16"})
    assert found.optimizer_class is cls
    assert found.optimizer_options.items() >= options.items()
    # A compressing optimizer clips and communicates itself.
    assert found.max_grad_norm == (None if is_compressed else 2.0)
    assert ("communication_data_type" in found.optimizer_options) == is_compressed
    (optimizer,) = found.optimizers(nn.Linear(2, 2))
    assert isinstance(optimizer, cls)


@pytest.mark.parametrize(("stage", "gathers_again"), [(2, False), (3, True)])
def test_stage_3_alone_gathers_weights_for_the_backward_pass(stage, gathers_again):
    found = md.from_ds_config({**BATCH, "zero_optimization": {"stage": stage}})
    assert found.fsdp_options()["reshard_after_forward"] is gathers_again


def test_gradients_of_16_bits_are_reduced_in_float32_unless_it_says_more():
    config = {**BATCH, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    for named, dtype in ((None, torch.float32), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        more = {} if named is None else {"communication_data_type": named}
        found = md.from_ds_config({**config, **more}).fsdp_options()["mp_policy"]
        assert (found.param_dtype, found.reduce_dtype) == (torch.bfloat16, dtype)


def test_float16_has_a_scaler():
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50}
    found = md.from_ds_config({**BATCH, "fp16": fp16})
    scaler = found.grad_scaler("cpu")
    assert (found.dtype, scaler.get_scale(), scaler.get_growth_interval()) == (
        torch.float16,
        256.0,
        50,
    )
    with found.autocast("cpu"):
        assert torch.is_autocast_enabled("cpu")
    with md.from_ds_config(BATCH).autocast("cpu"):
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ValueError, match="expected the configuration to have 'optimizer'"):
        found.optimizers(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"train_batch": 3}, "a key that has a meaning here, got 'train_batch'; leave it out"),
        ({"zero_optimization": {"stages": 1}}, "got 'zero_optimization.stages'"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "got 'zero_optimization.offload_optimizer'; use fully_shard's offload_policy",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "got 'scheduler'; use one of torch.optim.lr_sched"),
        ({"zero_optimization": {"stage": 4}}, "stage to be 0, 1, 2 or 3, got 4"),
        ({"gradient_clipping": "auto"}, "gradient_clipping to be a value, got 'auto'"),
        *(
            ({"fp16": {"enabled": True, "initial_scale_power": power}}, "to be at most 127, the")
            for power in (128, 10**9)
        ),
        ({"gradient_clipping": -1}, "gradient_clipping to be a number, at least 0, got -1"),
        ({"train_batch_size": 4.0}, "train_batch_size to be a whole number, at least 0, got 4.0"),
        ({"train_batch_size": 6}, "to be train_micro_batch_size_per_gpu .* got 6, 4 and 1"),
        ({"train_micro_batch_size_per_gpu": 0}, "or train_micro_batch_size_per_gpu to be given"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type to be one of .*'lamb'.*, got 'Lion'"),
        (
            {"optimizer": {"type": "Adam", "params": {"beta": 1}}},
            "got 'optimizer.params.beta'",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 1}},
            "stage to be 0 for optimizer.type 'onebitadam', .* got 1",
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "one of bf16.enabled and fp16"),
        ({"fp16": {"enabled": True, "loss_scale": 8}}, "fp16.loss_scale to be 0, .* got 8"),
        ({"communication_data_type": "int8"}, "communication_data_type to be one of .* 'int8'"),
        ({"moe": 2}, "expected moe to be a dict, got 2"),
        ({"bf16": {"enabled": "false"}}, "bf16.enabled to be true or false, got 'false'"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled to be true or false, got 1"),
        *(
            (
                {"optimizer": {"type": "Adam", "params": {name: value}}},
                f"optimizer.params.{name} to be {rule}, got",
            )
            for name, value, rule in (
                ("adam_w_mode", "false", "true or false"),
                ("amsgrad", "false", "true or false"),
                ("lr", "1e-3", "a number, at least 0"),
                ("betas", 0.9, "two numbers"),
                ("betas", [0.9], "two numbers"),
            )
        ),
        ({"sequence_parallel_size": 2}, "to divide the number of ranks, 1, got 2"),
    ],
)
def test_what_is_refused(more, message):
    with pytest.raises(ValueError, match=f"^from_ds_config: .*{message}"):
        md.from_ds_config({**BATCH, **more})


def test_what_is_ignored_is_said():
    more = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "flops_profiler": {}}
    more["flops_profiler"] = {"enabled": False}
    with pytest.warns(UserWarning, match="zero_optimization.overlap_comm ignored"):
        md.from_ds_config({**BATCH, **more})
    with pytest.warns(UserWarning, match="steps_per_print, dump_state ignored"):
        md.from_ds_config({**BATCH, "steps_per_print": 10, "dump_state": False})


class Model(nn.Module):
    def __init__(self, ep_group=None):
        super().__init__()
        torch.manual_seed(1)
        options = {"balance": 0.0, "ep_group": ep_group}
        self.inp, self.moe = nn.Linear(4, 8), moe_ext.MoELayer(8, 6, 4, **options)
        self.double()

    def forward(self, x):
        return self.moe(self.inp(x))


def rows(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator, dtype=torch.float64)


def train_on_rank(rank, stage):
    """Two clipped steps of two passes each, as the configuration says."""
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-4}},
        "gradient_clipping": 0.01,
        "moe": {"ep_size": 2},
        "zero_optimization": {"stage": stage},
    }
    found = md.from_ds_config(config)
    mesh = found.mesh()
    assert (mesh.ep_size, mesh.data_size, found.accumulation_steps) == (2, 2, 2)
    model = Model(mesh.ep_group)
    if stage > 1:
        md.fully_shard(model, mesh, **found.fsdp_options())
    optimizers = found.optimizers(model)
    assert isinstance(optimizers[0], ZeroRedundancyOptimizer) == (stage == 1)
    moe_ext.nn.set_loss_scale(model, 1 / found.accumulation_steps)
    for step in range(2):
        passes = rows(step).chunk(2)[mesh.data_rank].split(found.micro_batch_size)
        for number, x in enumerate(passes):
            if stage > 1:
                model.set_requires_gradient_sync(number == len(passes) - 1)
            (model(x).square().mean() / found.accumulation_steps).backward()
        if stage < 2:
            md.sync_gradients(model)
        md.clip_grad_norm_(model, found.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return md.full_state_dict(model)


@pytest.mark.parametrize("kind", ["Lamb", "OneBitLamb"])
def test_each_expert_has_a_norm_of_its_own(kind):
    params = {"lr": 0.1, "max_coeff": 100.0}
    config = {**BATCH, "optimizer": {"type": kind, "params": params}}
    found, model = md.from_ds_config(config), Model().float()
    (optimizer,) = found.optimizers(model)
    model(rows(0).float()).square().mean().backward()
    stacked = [p for p in model.parameters() if p.dim() == 3]
    apart = [[nn.Parameter(each.detach().clone()) for each in p] for p in stacked]
    for each, p in zip(apart, stacked, strict=True):
        for one, grad in zip(each, p.grad, strict=True):
            one.grad = grad.clone()
    optimizer.step()
    found.optimizer_class(sum(apart, []), **found.optimizer_options).step()
    for each, p in zip(apart, stacked, strict=True):
        torch.testing.assert_close(torch.stack(each), p)


def compressed_on_rank(rank):
    for kind in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam", "Lamb"):
        more = {"ZeroOneAdam": {"var_freeze_step": 1}, "Lamb": {}}.get(kind, {"freeze_step": 1})
        params = {"lr": 0.1, **more}
        config = {"train_batch_size": 4, "optimizer": {"type": kind, "params": params}}
        found = md.from_ds_config({**config, "moe": {"ep_size": 2}})
        model = Model(found.mesh().ep_group).float()
        before = {name: tensor.clone() for name, tensor in md.full_state_dict(model).items()}
        (optimizer,) = found.optimizers(model)
        for step in range(3):
            optimizer.zero_grad()
            model(rows(step).float().chunk(2)[rank]).square().mean().backward()
            if kind == "Lamb":
                md.sync_gradients(model)
            optimizer.step()
        after = md.full_state_dict(model)
        assert not any(torch.equal(after[name], before[name]) for name in before), kind
    return True


def test_optimizers_of_experts_over_ranks():
    assert spawn_ranks(compressed_on_rank, 2) == [True] * 2


def train_on_ranks(rank):
    return [train_on_rank(rank, stage) for stage in range(4)]


def test_training_by_a_configuration_equals_one_process():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.0)
    for step in range(2):
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    for found in spawn_ranks(train_on_ranks, 2):
        for state in found:
            for name, tensor in model.state_dict().items():
                # Some hundred roundings of 1e-16; Adam divides by 1e-4 at least.
                torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)
