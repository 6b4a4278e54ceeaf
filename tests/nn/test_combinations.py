"""Every pair of a layer's options works, or is refused by the table of `nn.combinations`.

One that works is run forward and backward and compared with the formula of the layer: a sum over
experts, by the slots that the router chose and the capacity left. Shapes: T tokens of a rank, D
model, E experts, K top-k.
"""

import functools
import itertools
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moe_ext import MoELayer
from moe_ext.dispatch import CAPABILITIES, AllToAllDispatcher, Wire
from moe_ext.dispatch.by_name import _CLASSES
from moe_ext.distributed import MoEMesh
from moe_ext.distributed.replicas import shards_of_experts
from moe_ext.nn import (
    Balance,
    Capacity,
    Dispatch,
    ExpertChoiceRouter,
    GroupedExperts,
    ModuleExperts,
    Rebalance,
    Router,
    RowBudget,
    SharedExpert,
    TopKRouter,
)
from moe_ext.nn.capacity import limit_choice
from moe_ext.nn.combinations import FEATURES, REFUSED, RULES, SETS_ROWS
from moe_ext.testing import spawn_ranks

D, F, E, K = 8, 6, 4, 2
PAGE = Path(__file__).resolve().parents[2] / "docs" / "dispatchers.md"


class Alone(nn.Module):
    """A router of no class of moe_ext."""

    def __init__(self):
        super().__init__()
        self.inner = TopKRouter(D, E, K)

    def forward(self, x_TD, *, token_mask=None):
        return self.inner(x_TD, token_mask=token_mask)


class NoReplay(TopKRouter):
    with_choice = Router.with_choice


class NoScores(TopKRouter):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)._replace(score_fn=None)


class OwnForward(GroupedExperts):
    def forward(self, rows_ND, expert_offsets):
        return 2 * super().forward(rows_ND, expert_offsets)


class Others(nn.Module):
    """Experts of no class of moe_ext."""

    def __init__(self, group):
        super().__init__()
        self.inner, self.ep_group, self.num_experts = OwnForward(E, D, F, ep_group=group), group, E

    def forward(self, rows_ND, expert_offsets):
        return self.inner(rows_ND, expert_offsets)


def own_experts(group):
    def made(index):
        with torch.random.fork_rng():
            torch.manual_seed(index)
            return nn.Linear(D, D)

    # With etp they refuse the group themselves.
    return ModuleExperts.build(made, E, ep_group=group if shards_of_experts(group) == 1 else None)


# By feature, what a layer gets; where the ranks matter, a function of the group.
MADE = {
    "capacity": {"capacity": Capacity(0.7)},
    "capacity.pad": {"capacity": Capacity(0.7, pad=True)},
    "capacity.drop='random'": {"capacity": Capacity(0.7, drop="random")},
    "capacity.overflow='reroute'": {"capacity": Capacity(0.7, overflow="reroute")},
    "row_budget": {"row_budget": RowBudget(7)},
    "row_budget.static": {"row_budget": RowBudget(8, static=True)},
    "overlap": {"overlap": 2},
    "rebalance": {"rebalance": Rebalance(break_even=0)},
    "an ep_group of several ranks": {},
    "etp": {},
    "combine='reduced'": {"combine": "reduced"},
    "wire": {"wire": "int8"},
    "wire.dispatch='lossless'": {"wire": Wire(dispatch="lossless")},
    "a dispatcher that is an object": {"dispatcher": lambda group: AllToAllDispatcher(E, group)},
    "experts of another class": {"experts": lambda group: Others(group)},
    "ModuleExperts": {"experts": own_experts},
    "experts with a forward of their own": {
        "experts": lambda group: OwnForward(E, D, F, ep_group=group)
    },
    "experts in shards of FSDP2": {},
    "a router of another class": {"router": lambda group: Alone()},
    "a router without with_choice": {"router": lambda group: NoReplay(D, E, K)},
    SETS_ROWS: {"router": lambda group: ExpertChoiceRouter(D, E)},
    "a router without score_fn": {"router": lambda group: NoScores(D, E, K)},
    "balance='sequence'": {"balance": Balance("sequence")},
    "a layer that counts tokens": {"balance": Balance("global_batch")},
    "torch.func": {},
    "vmap": {},
    # These go with everything.
    "rebalance='periodic'": {"rebalance": Rebalance("periodic", break_even=0)},
    "a shared expert": {"shared_expert": SharedExpert(5, gate=True)},
    "drop='score'": {"capacity": Capacity(0.7, drop="score")},
    "mode='return'": {"mode": "return"},
    "mode='both'": {"mode": "both"},
}
# The table knows such a one by another feature.
SAME = {"rebalance='periodic'": "rebalance", "drop='score'": "capacity"}
# What asks for ranks, by itself or to do anything; etp makes a mesh of its own.
RANKED = {
    *("overlap", "rebalance", "rebalance='periodic'", "an ep_group of several ranks", "etp"),
    *("combine='reduced'", "wire", "wire.dispatch='lossless'", "a dispatcher that is an object"),
    *("row_budget.static", "experts in shards of FSDP2"),
}
DISPATCHER = {f"dispatcher={name!r}": name for name in _CLASSES}
# They cannot run here, and so are refused by no pass.
LIBRARIES = {f"dispatcher={name!r}" for name in ("nccl_ep", "deep_ep", "symm_mem")}


def value(options, group):
    """Arguments of the layer, fields of `Balance` and `Dispatch` put into these."""
    given = {k: v(group) if callable(v) else v for k, v in options.items()}
    fields = ("dispatcher", "combine", "wire", "overlap", "rebalance")
    given["dispatcher"] = Dispatch(**{n: given.pop(n) for n in fields if n in given})
    given["balance"] = replace(given.get("balance", Balance()), mode=given.pop("mode", "inject"))
    return given


def merged(names):
    """Options of two features; None where they give one argument two values."""
    first, second = (MADE.get(name, {"dispatcher": DISPATCHER.get(name)}) for name in names)
    both = {*first} & {*second}
    if not both:
        return first | second
    if both == {"capacity"}:
        a, b = (each["capacity"] for each in (first, second))
        changed = {n: getattr(b, n) for n in ("drop", "overflow", "pad") if getattr(b, n)}
        usual = Capacity(1.0)
        changed = {n: v for n, v in changed.items() if v != getattr(usual, n)}
        if "drop" in changed and a.drop not in (usual.drop, b.drop):
            return None
        return {"capacity": replace(a, **changed)}
    return first | second if both == {"row_budget"} else None


OTHERS = {"experts of another class", "ModuleExperts"}


def features(names):
    """Of the table, what a layer with these has."""
    found = {"an ep_group of several ranks"} if names in ON_RANKS else set()
    found -= found if "experts in shards of FSDP2" in names else set()
    found |= {SAME.get(name, name) for name in names}
    found |= {"capacity"} & {name.split(".")[0] for name in found}
    found |= {"row_budget"} & {name.split(".")[0] for name in found}
    found |= {"torch.func"} if "vmap" in found else set()
    found |= {"experts of another class"} if "ModuleExperts" in found else set()
    found |= {"experts with a forward of their own"} if OTHERS & found else set()
    found |= {"a router without with_choice"} if "a router of another class" in found else set()
    found |= {"wire"} if "wire.dispatch='lossless'" in found else set()
    return found


def refused(names):
    """Text of the error; None for a pair that works."""
    found = features(names)
    for (first, second), reason in REFUSED.items():
        if {first, second} <= found:
            text = f"MoELayer: expected {RULES.get(first, f'{first} to be None')} with {second}"
            return re.escape(text), reason
    dispatcher = next((DISPATCHER[n] for n in names if n in DISPATCHER), None)
    for name in CAPABILITIES if dispatcher else ():
        if name in found and name not in _CLASSES[dispatcher].serves:
            return "MoELayer: expected dispatcher to be one of .* with " + re.escape(name), ""
    return None


NAMES = [*MADE, *DISPATCHER]
PAIRS = [
    pair
    for pair in itertools.combinations(NAMES, 2)
    if merged(pair) is not None and {*pair} != {"etp", "experts in shards of FSDP2"}
]
OVER_RANKS = RANKED | DISPATCHER.keys() - {"dispatcher='local'"}
ON_RANKS = {pair for pair in PAIRS if OVER_RANKS & {*pair}}


@functools.cache
def shards():
    return MoEMesh(ep=1, etp=2).ep_group


def group_of(names):
    if "etp" in names:
        return shards()
    return None if "experts in shards of FSDP2" in names else dist.group.WORLD


def make(names, group):
    torch.default_generator.manual_seed(3)
    layer = MoELayer(D, F, E, **value(merged(names), group), ep_group=group)
    if "experts in shards of FSDP2" in names:
        fully_shard(layer.experts, mesh=init_device_mesh("cpu", (2,)))
    return layer


# The arguments of a layer that say how it computes, or where a loss goes; the others say what.
HOW = {"row_budget", "overlap", "rebalance", "combine", "wire", "dispatcher", "mode"}


def inputs():
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(7 + rank)
    return [torch.randn(2, 5 + rank, D, generator=generator) for _ in "xg"]


@functools.cache
def formula(names, on_ranks):
    """Outputs and gradients of a sum over experts, with the losses of a layer that returns them.

    In the place of a feature that says how a layer computes stands one that gives it nothing.
    """
    torch.default_generator.manual_seed(3)
    options = {k: v for k, v in merged(names).items() if k not in HOW}
    if "capacity" in options:
        options["capacity"] = replace(options["capacity"], pad=False)
    layer = MoELayer(D, F, E, **value(options | {"mode": "return"}, None))
    x_BSD, like = inputs()
    x_TD = x_BSD.requires_grad_().flatten(0, -2)
    routed = layer.router(x_TD, token_mask=None)
    choice = limit_choice(layer.capacity, layer.router, routed, layer.top_k, None, training=True)
    y_TD = torch.zeros_like(x_TD)
    for e in range(E):
        offsets = torch.arange(E + 1).gt(e) * len(x_TD)
        weights_T1 = (choice.topk_weights * (choice.topk_idx == e)).sum(1, keepdim=True)
        y_TD = y_TD + weights_T1 * layer.experts(x_TD, offsets)
    if layer.shared_expert is not None:
        gate = torch.sigmoid(layer.shared_expert_gate(x_TD))
        y_TD = y_TD + gate * layer.shared_expert(x_TD)
    y_BSD = y_TD.view_as(x_BSD)
    layer(x_BSD)
    ((y_BSD * like).sum() + sum(layer.losses.values())).backward()
    found = {"outputs": y_BSD.detach(), "tokens": x_BSD.grad}
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name.startswith("experts.") and on_ranks:
            dist.all_reduce(grad)
            grad = grad / 2
        found[name] = grad
    return found


def run(names, group):
    """Both passes of a layer with a pair of features, beside its formula."""
    layer = make(names, group)
    x, like = inputs()
    x.requires_grad_()

    def objective_of(y):
        added = sum(layer.losses.values()) if layer.loss_mode == "return" else 0.0
        return (y * like).sum() + added

    if "vmap" in names:
        got, objective = torch.func.vmap(lambda x: [y := layer(x), objective_of(y)])(x[None])
        got = got[0]
        objective.sum().backward()
    elif "torch.func" in names:
        parameters = dict(layer.named_parameters())

        def loss(parameters, x):
            y = functional_call(layer, parameters, (x,))
            return objective_of(y), y.detach()

        gradients, got = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
        x.grad = gradients[1]
        for name, parameter in parameters.items():
            parameter.grad = gradients[0][name]
    else:
        got = layer(x)
        objective_of(got).backward()
    found = {}
    for name, parameter in layer.named_parameters():
        if isinstance(layer.experts, ModuleExperts) and name.startswith("experts."):
            _, local, rest = name.split(".")
            name = f"experts.{layer.experts.first_expert + int(local)}.{rest}"
        grad = parameter.grad
        if isinstance(grad, DTensor):
            # Of modules each rank has its own.
            alone = isinstance(layer.experts, ModuleExperts) and group is not None
            grad = grad.to_local() if alone else grad.full_tensor()
        found[name] = grad
    found |= {"outputs": got.detach(), "tokens": x.grad}
    what = tuple(n if MADE.get(n, {}).keys() - HOW else "torch.func" for n in names)
    lossy = 0.05 if "wire" in names else 1e-5
    for name, wanted in formula(what, names in ON_RANKS).items():
        if name in found:
            scale = max(float(wanted.abs().max()), 1e-3)
            grad = torch.zeros_like(wanted) if found[name] is None else found[name]
            assert float((grad - wanted).abs().max()) <= lossy * scale, name


def outcome(names, group):
    """What is wrong with a pair, None for nothing."""
    text, is_library = refused(names), bool(LIBRARIES & {*names})
    if is_library and (text is None or {"torch.func", "vmap"} & {*names}):
        return None
    try:
        if text is None:
            run(names, group)
            return None
        with pytest.raises((ValueError, RuntimeError), match=text[0]) as caught:
            run(names, group)
        assert text[1] in str(caught.value), caught.value
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:1500]
    return None


def of_a_rank(rank):
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # of "hierarchical"
    return {names: outcome(names, group_of(names)) for names in PAIRS if names in ON_RANKS}


@pytest.fixture(scope="module")
def found():
    return spawn_ranks(of_a_rank, 2, timeout=300, group_timeout=20)


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_a_pair_works_or_is_refused(names, request):
    if names in ON_RANKS:
        found = request.getfixturevalue("found")
        assert [each[names] for each in found] == [None, None]
    else:
        assert outcome(names, None) is None


def tables():
    """Those of the page: pairs that are refused, and what each dispatcher serves."""
    lines = ["| refused | beside | since |", "|---|---|---|"]
    for (first, second), reason in REFUSED.items():
        lines.append(f"| {first} | {second} | {reason} |")
    lines += ["", f"| dispatcher | {' | '.join(CAPABILITIES)} |"]
    lines.append("|---" * (1 + len(CAPABILITIES)) + "|")
    for name, kind in _CLASSES.items():
        marks = ["yes" if each in kind.serves else "-" for each in CAPABILITIES]
        lines.append(f'| "{name}" | {" | ".join(marks)} |')
    return "\n".join(lines)


def test_the_page_shows_the_table():
    assert tables() in PAGE.read_text(), tables()


def test_features_of_the_table_are_all_made():
    named = {name for pair in REFUSED for name in pair} | {*CAPABILITIES}
    assert named == {*FEATURES} and {*FEATURES} <= {*MADE}
