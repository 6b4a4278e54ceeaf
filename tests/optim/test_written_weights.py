"""Weights that a user writes between steps count, wherever a copy of them is kept."""

import importlib
import inspect
import pkgutil

import pytest
import torch
from one_bit_ranks import OPTIMIZERS
from torch import nn

import moe_ext
from moe_ext import optim
from moe_ext.compression import PackedExperts
from moe_ext.nn import ModuleExperts

# Steps until copies are there: those of ZeroOneAdam are local, and have a place to go back to.
OPTIONS = {
    "ZeroOneAdam": {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4},
    "OneBitAdam": {"freeze_step": 1},
    "OneBitLamb": {"freeze_step": 1},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_state_dict(layer, values):
    layer.load_state_dict({"weight": values})


def copy_(layer, values):
    with torch.no_grad():
        layer.weight.copy_(values)


def through_data(layer, values):
    """As averages of weights are swapped in by many tools; no version counter sees it."""
    layer.weight.data.copy_(values)


def one_row(layer, values):
    """The rest stays as it was, with what masters hold of it beyond its bits."""
    layer.weight.data[1].copy_(values[1])


def step(optimizer, layer, seed):
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(layer.weight.shape, generator=generator)
    layer.weight.grad = grad.to(layer.weight.dtype)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", [load_state_dict, copy_, through_data, one_row])
def test_optimizers_go_on_from_them(name, dtype, write):
    layer = nn.Linear(4, 4, bias=False, dtype=dtype)
    optimizer = OPTIMIZERS[name](layer.parameters(), lr=1e-3, **OPTIONS.get(name, {}))
    for seed in range(6):
        step(optimizer, layer, seed)
    before = layer.weight.detach().clone()
    values = before + 8
    written = torch.zeros(4, 1) if write is one_row else torch.ones(4, 1)
    written[1] = 1
    wanted = torch.where(written.bool(), values, before)
    write(layer, values)
    assert torch.equal(layer.weight, wanted)
    apart = name == "ZeroOneAdam" and not optimizer.synchronised
    if apart and write in (load_state_dict, copy_):
        with pytest.raises(ValueError, match="written by the optimizer alone between two sync"):
            step(optimizer, layer, 6)
        optimizer.flush()
        write(layer, values)
        wanted = layer.weight.detach().clone()
    elif apart:
        return  # seen by nothing: the page says to call flush first
    step(optimizer, layer, 6)
    # Steps of LAMB are as long as ten times the rate and the weights.
    assert bool(((layer.weight - wanted).abs() <= 10 * 1e-3 * 8 * 4 + 8 * 2**-8).all())


def test_what_is_not_written_keeps_its_master():
    layers = [nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [optim.CPUAdamW(layer.parameters(), lr=1e-4) for layer in layers]
    for seed in range(12):
        for optimizer, layer in zip(optimizers, layers, strict=True):
            step(optimizer, layer, seed)
        # The same values, written; and one row of others.
        layers[1].load_state_dict(layers[1].state_dict())
        if seed == 6:
            layers[1].weight.data[2] += 1
    masters = [o.state[x.weight]["master"] for o, x in zip(optimizers, layers, strict=True)]
    same = torch.arange(4) != 2
    assert torch.equal(masters[0][same], masters[1][same])
    assert bool((masters[1][2] > masters[0][2] + 0.5).all())


def takers_of_experts():
    """Modules of the package that are made of experts, and keep something of their weights."""
    found = {}
    for info in pkgutil.walk_packages(moe_ext.__path__, "moe_ext."):
        if info.name.startswith(("moe_ext.integrations", "moe_ext.__main__", "moe_ext._C")):
            continue
        for name, cls in vars(importlib.import_module(info.name)).items():
            if inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__ == info.name:
                first = next(iter(inspect.signature(cls).parameters), None)
                if first == "experts":
                    found[name] = cls
    return found


# They run the experts that they are given.
RUN_THEM = {ModuleExperts}
MAKERS = {
    PackedExperts: [
        {"format": "int8", "block": 64},
        {"format": "int4", "block": 64},
        {"format": "pruned"},
    ]
}


@pytest.mark.parametrize("write", [load_state_dict, copy_])
def test_modules_follow_them(write):
    found = takers_of_experts()
    assert set(found.values()) == {*MAKERS, *RUN_THEM}, "say how the new one is made"
    for cls, options in ((cls, options) for cls, all_ in MAKERS.items() for options in all_):
        experts = moe_ext.nn.GroupedExperts(2, 64, 64, bias=True)
        packed = cls(experts, **options)
        rows, offsets = torch.randn(6, 64), torch.tensor([0, 2, 6])
        first = packed(rows, offsets)
        state = {name: x * 2 for name, x in experts.state_dict().items()}
        if write is load_state_dict:
            experts.load_state_dict(state)
        else:
            with torch.no_grad():
                for name, x in experts.named_parameters():
                    x.copy_(state[name])
        again = packed(rows, offsets)
        assert torch.equal(again, cls(experts, **options)(rows, offsets))
        assert not torch.equal(again, first)
        del experts
        assert torch.equal(packed(rows, offsets), again)
