"""Options of other optimizers, in a group or in a state: refused, or of no matter."""

import collections
import copy
import inspect
import math

import pytest
import torch
from one_bit_ranks import OPTIMIZERS
from torch import nn

from moe_ext.optim import _arguments

OPTIONS = sorted(_arguments._options_of_torch() | _arguments._own_options)


def parameter():
    return nn.Parameter(torch.ones(4, 4))


def is_known(name, optimizer, option):
    own = option in optimizer.defaults and option != "differentiable"
    # The ranks of a group, which is taken out of it.
    ranks = option == "process_group" and name.startswith(("OneBit", "ZeroOne"))
    return own or ranks or option in _arguments._HOW


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_of_other_optimizers(name):
    assert {"maximize", "amsgrad", "momentum", "freeze_step", "differentiable"} <= set(OPTIONS)
    optimizer = OPTIMIZERS[name]([parameter()])
    before = copy.deepcopy(optimizer.state_dict())
    for option in (o for o in OPTIONS if not is_known(name, optimizer, o)):
        text = f"{name}: expected options of a parameter group to be those of {name}, got {option}="
        with pytest.raises(ValueError, match=text):
            optimizer.add_param_group({"params": [parameter()], option: 0.5, "weight_decay": 0.1})
        assert len(optimizer.param_groups) == 1
        state = copy.deepcopy(before)
        state["param_groups"][0].update({option: 0.5, "lr": 0.7, "weight_decay": 0.1})
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == before["param_groups"][0]["lr"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_makes_no_difference_is_taken(name):
    """Options that are off, that say how to compute, or that only their owner reads."""
    optimizer = OPTIMIZERS[name]([parameter()])
    unknown = [o for o in OPTIONS if not is_known(name, optimizer, o)]
    off = {option: _arguments._ALWAYS.get(option, False) for option in unknown}
    own = {"foreach": None, "capturable": False, "lr_scale": 0.5, "name": "dense"}
    optimizer.add_param_group({"params": [parameter()], **off, **own})
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group.update({**off, **own, "lr": 0.25})
    optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_have_options_in_range(name):
    optimizer = OPTIMIZERS[name]([parameter()])
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = -1.0
    with pytest.raises(ValueError, match=f"{name}: expected lr to be (at least 0|0 or more)"):
        optimizer.load_state_dict(state)
    # An option that a state lacks stays as it is.
    state["param_groups"][0].pop("weight_decay")
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["weight_decay"] == optimizer.defaults["weight_decay"]


BAD = [
    ("LAMB", {"lr": -1.0}, "LAMB: expected lr to be at least 0 and finite, got -1.0"),
    ("LAMB", {"eps": math.nan}, "LAMB: expected eps to be a number, got nan"),
    ("LAMB", {"betas": (1.0, 0.9)}, r"LAMB: expected betas to be .* got \(1.0, 0.9\)"),
    ("LAMB", {"weight_decay": -1}, "LAMB: expected weight_decay to be at least 0"),
    ("LAMB", {"min_coeff": 20.0}, r"expected max_coeff to be at least min_coeff \(20.0\)"),
    ("LARS", {"lr": math.inf}, "LARS: expected lr to be at least 0 and finite, got inf"),
    ("LARS", {"momentum": 1.0}, r"LARS: expected momentum to be in \[0, 1\), got 1.0"),
    ("LARS", {"momentum": 0, "nesterov": True}, "expected momentum to be positive with nest"),
    ("LARS", {"trust_coefficient": -1}, "LARS: expected trust_coefficient to be at least 0"),
    ("Adafactor", {"lr": -1.0}, "Adafactor: expected lr to be at least 0"),
    ("Adafactor", {"d": 0.5}, "Adafactor: expected d to be at least 1, got 0.5"),
    ("Adafactor", {"beta2_decay": 0.8}, "expected beta2_decay to be at most 0, got 0.8"),
    ("Adafactor", {"eps": (None, -1.0)}, r"expected eps\[1\] to be at least 0"),
    ("OneBitAdam", {"amsgrad": True}, "OneBitAdam: expected amsgrad to be False, got True"),
    ("OneBitAdam", {"freeze_step": -1}, "expected freeze_step to be at least 0, got -1"),
    ("OneBitAdam", {"freeze_step": 1.5}, "freeze_step to be an integer, got 1.5"),
    ("OneBitAdam", {"variance_interval": -1}, "variance_interval to be at least 0, got -1"),
    ("OneBitAdam", {"block": 100}, "block to be a power of two from 64 to 1024, got 100"),
    ("OneBitAdam", {"lr": -1.0}, "OneBitAdam: expected lr to be at least 0 and finite, got -1.0"),
    ("OneBitAdam", {"betas": (0.9,)}, "expected betas to be two numbers"),
    ("OneBitAdam", {"max_grad_norm": -1.0}, "expected max_grad_norm to be at least 0"),
    (
        "OneBitAdam",
        {"communication_data_type": torch.int8},
        "expected communication_data_type to be None, float32, bfloat16 or float16, got torch.int8",
    ),
    ("OneBitLamb", {"amsgrad": True}, "OneBitLamb: expected amsgrad to be False, got True"),
    ("OneBitLamb", {"coeff_beta": 1.0}, r"expected coeff_beta to be in \[0, 1\), got 1.0"),
    ("OneBitLamb", {"factor_min": 5.0}, r"expected factor_max to be at least factor_min \(5.0\)"),
    ("OneBitLamb", {"min_coeff": 50.0}, r"expected max_coeff to be at least min_coeff \(50.0\)"),
    ("OneBitLamb", {"factor_threshold": -1}, "expected factor_threshold to be at least 0"),
    ("ZeroOneAdam", {"amsgrad": True}, "ZeroOneAdam: expected amsgrad to be False, got True"),
    ("ZeroOneAdam", {"var_freeze_step": 0}, "var_freeze_step to be an integer of at least 1"),
    ("ZeroOneAdam", {"var_update_scaler": 0}, "var_update_scaler to be an integer of at least 1"),
    ("ZeroOneAdam", {"local_step_scaler": 0}, "local_step_scaler to be an integer of at least 1"),
    ("ZeroOneAdam", {"local_step_clipper": 0}, "local_step_clipper to be an integer of at least"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_options_out_of_range(name, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        OPTIMIZERS[name]([parameter()], **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_is_a_number_or_a_tensor_of_one(name):
    found = []
    for rate in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
        p = parameter()
        p.grad = torch.eye(4)
        OPTIMIZERS[name]([p], lr=rate).step()
        found.append(p.detach())
    torch.testing.assert_close(found[1:], found[:1] * 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_that_is_no_number(name):
    for rate in ("1e-3", None, torch.tensor([0.5, 0.5])):
        with pytest.raises(TypeError, match=f"{name}: expected lr to be a number, got"):
            OPTIMIZERS[name]([parameter()], lr=rate)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_options_are_numbers_or_tensors_without_dimensions(name):
    cls, found = OPTIMIZERS[name], {}
    arguments = inspect.signature(cls).parameters.items()
    fixed = {"freeze_step": 2} if name.startswith("OneBit") else {}
    for option, given in arguments:
        is_pair = option.endswith("betas")
        if not is_pair and not isinstance(given.default, float) or option == "lr":
            continue
        numbers = given.default if is_pair else [given.default]
        rows = [torch.tensor([number], dtype=torch.float64) for number in numbers]
        with pytest.raises((TypeError, ValueError), match=f"{name}: expected {option} to be "):
            cls([parameter()], **{option: tuple(rows) if is_pair else rows[0]})
        scalars = [row.view(()) for row in rows]
        for value in (given.default, tuple(scalars) if is_pair else scalars[0]):
            p = parameter()
            optimizer = cls([p], **{option: value}, **fixed)
            for seed in range(4):
                train(optimizer, {"p": p}, seed)
            found.setdefault(option, []).append(p.detach())
    for one, other in found.values():
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in ("Adafactor", "CPUAdamW", "LAMB", "LARS", "Muon")]
    + [("Muon", {"use_muon": False})],
)
def test_steps_without_values(name, options, dtype):
    """As tools that estimate memory take them; those that look for NaN have values to look at."""
    with torch._subclasses.FakeTensorMode():
        p = nn.Parameter(torch.ones(4, 4, dtype=dtype))
        optimizer = OPTIMIZERS[name]([p], **options)
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert optimizer.state[p]


def train(optimizer, parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters.values():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_go_by_the_names_of_parameters(name):
    first, other = ({key: parameter() for key in "abc"} for _ in range(2))
    one = OPTIMIZERS[name]([*first.items()], lr=0.1)
    two = OPTIMIZERS[name]([(key, other[key]) for key in "cab"], lr=0.1)
    for seed in range(4):
        train(one, first, seed)
        if seed == 1:
            two.load_state_dict(copy.deepcopy(one.state_dict()))
            for p, q in zip(first.values(), other.values(), strict=True):
                q.data.copy_(p.data)
        if seed > 1:
            train(two, other, seed)
    assert all(map(torch.equal, first.values(), other.values()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_leave_a_loaded_state_alone(name):
    one, other = {"p": parameter()}, {"p": parameter()}
    first, second = (OPTIMIZERS[name]([*p.items()], lr=0.1) for p in (one, other))
    train(first, one, 0)
    state = first.state_dict()
    before = copy.deepcopy(state)
    second.load_state_dict(state)
    train(second, other, 1)
    del state["param_groups"], before["param_groups"]
    torch.testing.assert_close(state, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"DeMo"}))
@pytest.mark.parametrize("steps", [1, 4])
def test_a_state_that_is_replaced_is_begun_anew(name, steps):
    """As programs reset an optimizer in a restart; the momentum of DeMo is not in it."""
    parameters = {"p": parameter()}
    options = {"freeze_step": 2} if name.startswith("OneBit") else {}
    optimizer = OPTIMIZERS[name]([*parameters.items()], lr=0.1, **options)
    for seed in range(steps):
        train(optimizer, parameters, seed)
    optimizer.state = collections.defaultdict(dict)
    train(optimizer, parameters, steps)
    assert tensors(optimizer.state_dict()["state"]) > 0


def tensors(value):
    """Number of tensors of more than one element in a state."""
    if isinstance(value, torch.Tensor):
        return int(value.numel() > 1)
    parts = value.values() if isinstance(value, dict) else value
    return sum(map(tensors, parts)) if isinstance(value, (dict, list, tuple)) else 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_of_states_get_all_of_them(name):
    """And once: a hook may rename what another program has saved, or wrap what this one saves."""
    one, other = {"p": parameter()}, {"p": parameter()}
    first, second = (OPTIMIZERS[name]([*p.items()], lr=0.1) for p in (one, other))
    seen = []
    first.register_state_dict_pre_hook(lambda _: seen.append("before"))

    def wrap(optimizer, state):
        seen.append(tensors(state))
        return {"wrapped": state}

    def unwrap(optimizer, state):
        seen.append(tensors(state))
        return state["wrapped"]

    first.register_state_dict_post_hook(wrap)
    second.register_load_state_dict_pre_hook(unwrap)
    second.register_load_state_dict_post_hook(lambda o: seen.append(tensors(o.state_dict())))
    for seed in range(3):
        train(first, one, seed)
    second.load_state_dict(first.state_dict())
    assert seen[0] == "before" and seen[1:] == seen[1:2] * 3 and seen[1] > 0
    with torch.no_grad():
        other["p"].copy_(one["p"])
    train(first, one, 3)
    train(second, other, 3)
    assert torch.equal(one["p"], other["p"])
