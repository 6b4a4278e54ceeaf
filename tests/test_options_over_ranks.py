"""Whoever exchanges compares its options over the ranks: each argument of each constructor.

One of two ranks gives another value: all of them raise the same error, which names the argument,
the ranks and the values, and nothing has changed. What ranks may give each in its own way is listed
with a reason, which the docstring has too.
"""

import copy
import functools
import inspect
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from test_public_api import public
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import moe_ext
from moe_ext import attention, compression, optim, pipeline, sync
from moe_ext import distributed as md
from moe_ext import nn as mn
from moe_ext.comm.link import Link
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations import (
    deepspeed,
    fairscale,
    fastmoe,
    grace,
    huggingface,
    megablocks,
    paddle,
    tutel,
)
from moe_ext.nn.balance import moved

D, F, E, K = 8, 6, 8, 2
# Arguments of a rank's own: its tensors and modules, and the ranks that compare.
OF_A_RANK = {
    *("device", "group", "ep_group", "cp_group", "process_group", "node_group"),
    *("model", "optimizer", "params", "stages", "experts", "ffn", "loss_fn", "update", "end"),
    *("q", "k", "v", "g", "x", "dt", "B", "C", "input", "output", "bitmap", "rng_state"),
    *("loss_sum", "logits", "shift_labels"),
    *("latent", "rope_key", "up_k", "up_v", "grad", "values_K", "indices_K", "out"),
    *("residual", "server_residual", "residual_in", "server_residual_in"),
}
# By these names an argument names ranks that exchange.
RANKS = {
    *("group", "ep_group", "cp_group", "tp_group", "process_group", "process_groups"),
    *("node_group", "local_group", "moe_group", "mp_group", "slice_group"),
    *("expert_parallel_group", "manager", "mesh", "dispatcher"),
}
_OURS = "tests/test_options_over_ranks.py"
_FACADE = f"{_OURS}::facades"
_LIBRARIES = "tests/dispatch/test_gpu_libraries.py"
_DIFFER = f"{_LIBRARIES}::check_options_that_differ_are_refused"
_SENDS_NOTHING = "the group tells this rank's part, and nothing is sent"
_COMPARES_NOTHING = "the ranks compare nothing"
# Public names that take ranks and have no case here. The reason is a test that names them, a case
# that makes them, words of their docstring, or a text; `test_reasons_are_true` reads it.
EXEMPT = {
    "moe_ext.nn.log_metrics": "sums metrics, and has no option of the sums",
    "moe_ext.nn.reduce_metrics": "sums metrics, and has no option of the sums",
    "moe_ext.nn.upcycle": _FACADE,
    "moe_ext.distributed.DeepEpDispatcher": _DIFFER,
    "moe_ext.distributed.NcclEpDispatcher": _DIFFER,
    "moe_ext.distributed.SymmetricMemoryDispatcher": _DIFFER,
    "moe_ext.distributed.TokenDispatcher": "base of the dispatchers, which have cases",
    "moe_ext.distributed.Placement": _SENDS_NOTHING,
    "moe_ext.distributed.fully_shard": "tests/distributed/test_fsdp.py::wrong_meshes_are_refused",
    "moe_ext.distributed.layout_placements": _SENDS_NOTHING,
    "moe_ext.distributed.naming_failed_ranks": _SENDS_NOTHING,
    "moe_ext.parallelize": "tests/distributed/test_spread.py"
    "::everything_else_is_refused_on_every_rank_and_nothing_changed",
    "moe_ext.distributed.sync_gradients": "tests/distributed/test_gradients.py"
    "::check_models_that_differ_are_refused",
    "moe_ext.attention.document_ids": _SENDS_NOTHING,
    "moe_ext.attention.gather_from_sequence": _COMPARES_NOTHING,
    "moe_ext.attention.group_sampler": _SENDS_NOTHING,
    "moe_ext.attention.position_ids": _SENDS_NOTHING,
    "moe_ext.attention.reduce_scatter_to_sequence": _COMPARES_NOTHING,
    "moe_ext.attention.scatter_to_sequence": _COMPARES_NOTHING,
    "moe_ext.attention.shard_sequence": _SENDS_NOTHING,
    "moe_ext.compression.CompressedAllReduce": "made by zero_plus_plus",
    "moe_ext.compression.CostModel": "tests/compression/test_cost_model.py::ranks_agree",
    "moe_ext.compression.Reduction": "handle of a collective that has compared its arguments",
    "moe_ext.compression.lossless_all_gather": "tests/compression/test_lossless.py::refuses_alike",
    "moe_ext.optim.param_groups": _SENDS_NOTHING,
    "moe_ext.planner.Applied": "Plan.apply has compared the model and the mesh",
    "moe_ext.planner.exchange_bytes": _SENDS_NOTHING,
    "moe_ext.planner.measure_cluster": "measures; what is measured is shared",
    "moe_ext.integrations.huggingface.from_pretrained": "made by replace",
    "moe_ext.integrations.huggingface.shard_batch": _SENDS_NOTHING,
    "moe_ext.integrations.torchft.average_over_groups": "tests/integrations/test_torchft.py"
    "::first_quorums",
    "moe_ext.integrations.deepspeed.TopKGate": _FACADE,
    "moe_ext.integrations.fairscale.MOELayer": _FACADE,
    "moe_ext.integrations.fastmoe.FMoE": _FACADE,
    "moe_ext.integrations.megablocks.Arguments": _FACADE,
    "moe_ext.integrations.paddle.GShardGate": _FACADE,
    "moe_ext.integrations.paddle.MoELayer": _FACADE,
    "moe_ext.integrations.paddle.SwitchGate": _FACADE,
    "moe_ext.integrations.tutel.MOELayer": _FACADE,
    "moe_ext.integrations.grace.Allgather": "made by grace_from_params",
    "moe_ext.integrations.grace.Allreduce": "made by grace_from_params",
    "moe_ext.integrations.grace.Communicator": "made by grace_from_params",
    "moe_ext.integrations.grace.DgcMemory": "made by grace_from_params",
    "moe_ext.integrations.grace.PowerSGDCompressor": "made by grace_from_params",
}


@dataclass
class Case:
    """An object that exchanges, beside the class or function that makes it.

    Attributes:
        use: makes it with arguments of this rank and lets it exchange; gives its tensors. It has
            an argument `kind` where it makes several classes.
        other: by argument, what one rank gives: another value, or (value of all others, value).
        given: arguments of `use` on all ranks.
        names: name in the error where it is not the argument's.
        free: arguments that ranks may give each in its own way, with words of the docstring.
        elsewhere: arguments that are compared and not varied here, with who compares them.
    """

    use: object
    other: dict
    given: dict = field(default_factory=dict)
    names: dict = field(default_factory=dict)
    free: dict = field(default_factory=dict)
    elsewhere: dict = field(default_factory=dict)


def arguments_of(made):
    """Names of its arguments, none where it has no signature."""
    try:
        found = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


class Pair(tuple):
    """(value of the other ranks, value of one)."""


def layer_of(**options):
    """A layer over the ranks, and a pass through it."""
    sizes = {"model_dim": D, "ffn_dim": F, "num_experts": E} | options
    if not isinstance(options.get("router"), mn.Router):
        sizes.setdefault("top_k", K)
    layer = moe_ext.MoELayer(ep_group=dist.group.WORLD, **sizes)
    yield layer
    x = torch.randn(5, layer.model_dim, dtype=layer.experts.down_proj.dtype)
    ids = torch.zeros(5, dtype=torch.int64) if isinstance(layer.router, mn.HashRouter) else None
    layer(x, token_ids=ids).sum().backward()


def routed_by(kind, **options):
    sizes = {"model_dim": D, "num_experts": E} | options
    return layer_of(
        router=kind(**sizes), model_dim=sizes["model_dim"], num_experts=sizes["num_experts"]
    )


def with_option(kind, name, **options):
    return layer_of(**{name: kind(**options)})


def with_field(kind, name, **options):
    return layer_of(dispatcher=mn.Dispatch(**{name: kind(**options)}))


def grouped_experts(**options):
    sizes = {"num_experts": E, "model_dim": D, "ffn_dim": F} | options
    experts = mn.GroupedExperts(ep_group=dist.group.WORLD, **sizes)
    return layer_of(experts=experts, model_dim=sizes["model_dim"], num_experts=sizes["num_experts"])


def dispatched_by(kind, **options):
    """Rows to the experts and back."""
    made = kind(**({"num_experts": E, "group": dist.group.WORLD} | options))
    yield nn.Module()
    idx, weights = torch.tensor([[0, E - 1]] * 3), torch.ones(3, 2)
    if isinstance(made, md.AutoDispatcher):
        made, _ = made.choose(torch.randn(3, D), 2, in_rounds=False)
    rows, _, metadata = made.dispatch(torch.randn(3, D), idx, weights)
    made.combine(rows, metadata)


def stepped(kind, seed=0, **options):
    """Two steps of an optimizer that communicates."""
    torch.manual_seed(seed)
    net = nn.Linear(8, 8)
    yield [*net.parameters()]
    made = kind(net.parameters(), **options)
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.randn(p.shape)
        made.step()


def rounds(kind, seed=0, outer=None, fragments=1, muon=False, **options):
    """Two rounds of local steps."""
    torch.manual_seed(seed)
    nets = [nn.Linear(8, 8, bias=False) for _ in range(fragments)]
    trained = [p for net in nets for p in net.parameters()]
    yield trained
    inner = (
        optim.Muon(trained, lr=0.1) if kind is optim.MuLoCo else torch.optim.SGD(trained, lr=0.1)
    )
    outers = [torch.optim.SGD(net.parameters(), **{"lr": 1.0, **(outer or {})}) for net in nets]
    options = {"manager": None, "sync_every": 2} | options
    with kind(model_fragments=nets, inner_optimizer=inner, outer_optimizer=outers, **options):
        for _ in range(2 * options["sync_every"]):
            for p in trained:
                p.grad = torch.randn(p.shape)
            inner.step()


def rows_of(shape):
    """A parameter whose matrices are divided by rows, with a gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p, grad = (distribute_tensor(torch.ones(shape), mesh, [Shard(len(shape) - 2)]) for _ in "pg")
    p = nn.Parameter(p)
    p.grad = grad
    return p


def sharded_step(kind, shape=(4, 6), **options):
    """Two steps of an optimizer whose parameters are divided over the ranks."""
    params = [rows_of(shape) for _ in range(2)]
    yield [p.to_local() for p in params]
    made = kind(params, **options)
    for _ in range(2):
        made.step()


def attended(kind, heads=2, kv_heads=2, dim=4, dtype=torch.float32, **options):
    """A pass through attention over the ranks, and back."""
    module = kind(group=dist.group.WORLD, **options)
    yield module
    q, k, v = (torch.ones(1, n, 4, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    module(*(x.requires_grad_() for x in (q, k, v))).sum().backward()


def block_of(kind, told=(), ranks="group", **options):
    """A pass through a module that makes `[1, 4, D]` of the same, and back."""
    module = kind(**{ranks: dist.group.WORLD}, **options)
    yield module
    x = torch.ones(1, 4, options["model_dim"], dtype=options.get("dtype"), requires_grad=True)
    module(x, **dict(told)).sum().backward()


LOCAL = {
    "model_fragments": Pair(({}, {"fragments": 2})),
    "outer_optimizer": Pair(({}, {"outer": {"lr": 0.5}})),
    "sync_every": Pair((2, 3)),
    "fragment_sync_delay": 1,
    "fragment_update_alpha": 0.5,
    "seed": 1,
}
LOCAL_FREE = {
    "inner_optimizer": "Workers may have different ones",
    "manager": "the workers",
    "backup_device": "where the weights of the last round are kept",
    "pin_memory": "without effect",
    "use_bucketization": "in any case",
    "bucket_cap_mb": "without effect",
}
SIZES = {"model_dim": Pair((D, 2 * D)), "num_experts": Pair((E, 2 * E))}
ROUTER = {**SIZES, "dtype": torch.bfloat16, "scale": 2.0}
TOP_K = {"top_k": Pair((2, 3))}
SHARDED = {"lr": 0.5, "weight_decay": 0.25, "maximize": True, "float32_state": False}
ROWS = {"drop_policy": "score", "average": False, "wire": "int8", "num_experts": 2 * E}

CASES = {
    moe_ext.MoELayer: Case(
        layer_of,
        {
            **SIZES,
            **TOP_K,
            "ffn_dim": 2 * F,
            "router": "sigmoid",
            "experts": lambda: mn.GroupedExperts(
                E, D, F, activation="relu", ep_group=dist.group.WORLD
            ),
            "activation": "geglu",
            "bias": True,
            "capacity": mn.Capacity(1.0),
            "row_budget": mn.RowBudget(16, static=True),
            "balance": mn.Balance("sequence"),
            "shared_expert": 4,
            "dispatcher": "dedup",
            "dtype": torch.bfloat16,
        },
        names={"bias": "gate_up_proj_bias"},
    ),
    mn.SharedExpert: Case(
        with_option,
        {"ffn_dim": Pair((4, 8)), "gate": Pair(({"ffn_dim": 4}, True))},
        given={"name": "shared_expert"},
        names={"ffn_dim": "shared_expert.ffn_dim", "gate": "shared_expert_gate"},
    ),
    mn.Dispatch: Case(
        with_option,
        {
            "dispatcher": "dedup",
            "combine": "reduced",
            "wire": "int8",
            "rebalance": "exact",
            "overlap": 2,
            "debug": True,
        },
        given={"name": "dispatcher"},
    ),
    mn.TopKRouter: Case(
        routed_by,
        {
            **ROUTER,
            **TOP_K,
            "score_fn": "sigmoid",
            "renormalize": False,
            "num_groups": Pair(({"top_groups": 2, "num_groups": 2}, 4)),
            "top_groups": Pair(({"num_groups": 4, "top_groups": 2}, 3)),
            "group_score": Pair(({"num_groups": 4, "top_groups": 2}, "top2")),
            "bias": True,
            "selection_bias": True,
            "bias_update": Pair(({"selection_bias": True, "score_fn": "sigmoid"}, "quantile")),
        },
    ),
    mn.SwitchRouter: Case(routed_by, {**ROUTER, "jitter_eps": 0.1, "seed": 3}),
    mn.GShardRouter: Case(routed_by, {**ROUTER, "second_expert": "always", "seed": 3}),
    mn.NoisyTopKRouter: Case(
        routed_by,
        {
            **ROUTER,
            **TOP_K,
            "importance_coef": 0.5,
            "load_coef": 0.5,
            "noise_epsilon": 0.5,
            "seed": 3,
        },
    ),
    mn.BaseRouter: Case(routed_by, {**SIZES, "dtype": torch.bfloat16}),
    mn.SinkhornRouter: Case(
        routed_by, {**SIZES, **TOP_K, "dtype": torch.bfloat16, "num_iters": 7, "tolerance": 0.1}
    ),
    mn.CosineRouter: Case(
        routed_by,
        {
            **ROUTER,
            **TOP_K,
            "proj_dim": 4,
            "init_temperature": 0.7,
            "min_temperature": 0.02,
            "renormalize": Pair(({"top_k": 2}, False)),
        },
    ),
    mn.ExpertChoiceRouter: Case(
        routed_by, {**SIZES, "dtype": torch.bfloat16, "capacity_factor": 1.0}
    ),
    mn.HashRouter: Case(
        routed_by,
        {
            **SIZES,
            **TOP_K,
            "scale": 2.0,
            "vocab_size": 16,
            "method": "random",
            "token_counts": torch.arange(8),
            "seed": 3,
            "learned": True,
            "score_fn": Pair(({"learned": True}, "sigmoid")),
            "renormalize": Pair(({"learned": True, "top_k": 2}, False)),
            "dtype": Pair(({"learned": True}, torch.bfloat16)),
        },
        given={"vocab_size": 8},
    ),
    mn.GroupedExperts: Case(
        grouped_experts,
        {
            **SIZES,
            "ffn_dim": 2 * F,
            "activation": "geglu",
            "gated": Pair(({"activation": "tanh"}, True)),
            "bias": True,
            "layout": "interleaved",
            "transposed": True,
            "post_norm": lambda: nn.Identity(),
            "dtype": torch.bfloat16,
        },
        names={"bias": "gate_up_proj_bias"},
    ),
    mn.Capacity: Case(
        with_option,
        {
            "factor": Pair((1.0, 2.0)),
            **{"minimum": 2, "groups": 2, "drop": "score", "overflow": "reroute", "pad": True},
            **{"eval_factor": 2.0, "seed": 3},
        },
        given={"name": "capacity", "factor": 1.0},
    ),
    mn.RowBudget: Case(
        with_option,
        {"rows": 18, "overflow": "drop", "static": True},
        given={"name": "row_budget", "rows": 16},
    ),
    mn.Balance: Case(
        with_option,
        {"scope": "sequence", "coef": 0.5, "z_coef": 0.5, "mode": "return"},
        given={"name": "balance"},
    ),
    md.Wire: Case(
        with_field,
        {name: "int8" for name in ("dispatch", "combine", "backward_dispatch", "backward_combine")},
        given={"name": "wire"},
    ),
    mn.Rebalance: Case(
        with_field,
        {"mode": "periodic", "break_even": 2.0, "every": 7, "hysteresis": 0.5},
        given={"name": "rebalance"},
        free={"link": "may differ between ranks", "flops": "As `link`", "flops_alone": "As `link`"},
    ),
    md.AllToAllDispatcher: Case(dispatched_by, ROWS),
    md.DedupDispatcher: Case(dispatched_by, {**ROWS, "combine": "reduced"}),
    md.AllGatherDispatcher: Case(dispatched_by, {**ROWS, "combine": "reduced"}),
    md.HierarchicalDispatcher: Case(
        dispatched_by, {**ROWS, "combine": "reduced", "node_size": 2}, given={"node_size": 1}
    ),
    optim.DeMo: Case(
        stepped,
        {
            "params": Pair(({}, {"seed": 1})),
            "lr": 0.5,
            "compression_decay": 0.5,
            "compression_topk": 4,
            "compression_chunk": 32,
            "weight_decay": 0.1,
        },
        names={"params": "parameters"},
    ),
    optim.DiLoCo: Case(
        rounds,
        {**LOCAL, "codec": "int8", "should_quantize": True},
        names={"should_quantize": "codec", "seed": "parameters"},
        free=LOCAL_FREE,
    ),
    optim.SparseLoCo: Case(
        rounds,
        {**LOCAL, "density": 0.1, "chunk": 64, "bits": 32, "decay": 0.5},
        names={
            **dict.fromkeys(("density", "chunk", "bits", "decay"), "codec"),
            "seed": "parameters",
        },
        free=LOCAL_FREE,
    ),
    optim.MuLoCo: Case(
        rounds, {**LOCAL, "codec": "int8"}, names={"seed": "parameters"}, free=LOCAL_FREE
    ),
    md.AutoDispatcher: Case(
        dispatched_by, {"combine": "reduced", "wire": "int8", "num_experts": 2 * E}
    ),
}
CASES |= {
    attention.RingAttention: Case(
        attended,
        {
            "layout": "striped",
            "is_causal": True,
            "scale": 0.25,
            "window": (1, 1),
            "softcap": 1.0,
            "dropout_p": 0.1,
            "scheme": "ulysses",
            "precision": "fast",
            "kv_grad_dtype": torch.bfloat16,
            "wire": "int8",
        },
    ),
    attention.RingSelfAttention: Case(
        block_of,
        {
            "model_dim": Pair((8, 16)),
            "num_heads": Pair((4, 2)),
            "num_kv_heads": 2,
            "bias": False,
            "dropout": 0.1,
            "is_causal": True,
            "layout": "striped",
            "rotary_base": Pair((1e4, 1e6)),
            "dtype": torch.float64,
        },
        given={"model_dim": 8, "num_heads": 4},
    ),
    attention.SequenceParallelMLP: Case(
        block_of,
        {
            "model_dim": Pair((8, 16)),
            "ffn_dim": Pair((12, 16)),
            "activation": "swiglu",
            "norm": "rms_norm",
            "norm_eps": 0.1,
            "bias": False,
            "dropout": 0.1,
            "layout": "striped",
            "regather": True,
            "grad_reduction": "mean",
            "dtype": torch.float64,
        },
        given={"model_dim": 8, "ffn_dim": 12},
    ),
    mn.TransformerBlock: Case(
        block_of,
        {
            "model_dim": Pair((8, 16)),
            "num_heads": Pair((2, 4)),
            "num_kv_heads": 1,
            "layout": "striped",
            "window": (1, 1),
            "dropout_p": 0.1,
            "rope_base": 1e6,
            "scheme": "ulysses",
            "precision": "fast",
            "eps": 0.1,
            "dtype": torch.float64,
        },
        given={
            **{"told": {"position_ids": torch.arange(4)}, "ranks": "cp_group"},
            **{"model_dim": 8, "num_heads": 2, "ffn": nn.Identity()},
        },
        names={"model_dim": "D of q", "num_heads": "H of q", "num_kv_heads": "Hkv of k"},
    ),
    optim.LAMB: Case(
        sharded_step,
        {
            **SHARDED,
            **{"betas": (0.5, 0.5), "eps": 0.1, "bias_correction": False, "min_coeff": 0.1},
            **{"max_coeff": 5.0, "adapt": False, "per_expert": True},
        },
    ),
    optim.LARS: Case(
        sharded_step,
        {
            **SHARDED,
            **{"momentum": 0.5, "trust_coefficient": 0.1, "eps": 0.1, "nesterov": True},
            **{"adapt": False, "per_expert": True},
        },
    ),
    optim.Adafactor: Case(
        sharded_step,
        {
            **SHARDED,
            **{"beta2_decay": -0.5, "eps": (0.1, 0.1), "d": 2.0, "per_expert": True},
            "foreach": True,
        },
    ),
    optim.Muon: Case(
        sharded_step,
        {
            **SHARDED,
            **{"momentum": 0.5, "nesterov": False, "ns_coefficients": (2.0, -1.5, 0.5)},
            **{"eps": 0.1, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
            **{"ns_dtype": "float32", "use_muon": False, "adamw_betas": (0.5, 0.5)},
            **{"adamw_eps": 0.1, "fused": 2, "interleaved": True, "transposed": True},
            "per_expert": Pair(({"shape": (2, 4, 6)}, True)),
        },
    ),
}


def reduced(hooked=False, **options):
    """Two steps that compress gradients, in a loop or by the hook of DistributedDataParallel."""
    net = nn.Linear(64, 64)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
    optimizer = torch.optim.SGD(net.parameters(), **{"lr": 0.1, **options.pop("rate", {})})
    yield [*net.parameters()]
    state = compression.CompressionState(model=net, optimizer=optimizer, **options)
    if hooked:
        net = nn.parallel.DistributedDataParallel(net)
        net.register_comm_hook(state, compression.compress_hook)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 64)).sum().backward()
        if not hooked:
            compression.compress_gradients(net, state)
        optimizer.step()


def wrapped(nodes=False, **options):
    """A pass of a model of FSDP2 whose messages are compressed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if nodes:
        names = ("nodes", "ranks")
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=names)["ranks"]
        options = {"node_group": dist.group.WORLD} | options
    net = nn.Linear(64, 64)
    torch.distributed.fsdp.fully_shard(net, mesh=mesh)
    yield [p.to_local() for p in net.parameters()]
    options = {"zero_quantized_weights": True, "zero_quantized_gradients": True} | options
    compression.zero_plus_plus(net, **options)
    net(torch.ones(2, 64)).sum().backward()


def called(kind, shapes=(), **options):
    """A collective of tensors of ones."""
    x = [torch.ones(shape) for shape in shapes]
    yield x
    kind(*x, **options)


def attended_by(kind, **options):
    """`ring_attention`, or another of its arguments, and back."""
    x = {name: torch.ones(1, 2, 4, 4, requires_grad=True) for name in "qkv"} | options
    q, k, v = (x.pop(name) for name in "qkv")
    yield []
    kind(q, k, v, group=dist.group.WORLD, **x).sum().backward()


def piped(**options):
    """A pipeline of two stages, and a step."""
    net = ones()
    yield net
    table = pipeline.make_table("gpipe", 2, 2)
    run = {"table": table, "loss_fn": nn.functional.mse_loss} | options
    made = pipeline.Pipeline(stages={dist.get_rank(): net}, group=dist.group.WORLD, **run)
    given = [torch.ones(2, 8)] * 2
    made.step(given if dist.get_rank() == 0 else None, targets=given if last() else None)


def coded(compressor="topk", memory="residual", **params):
    """Two steps of a communicator of GRACE."""
    yield []
    params = {"communicator": "allgather", "compress_ratio": 0.1} | params
    made = grace.grace_from_params({"compressor": compressor, "memory": memory, **params})
    for step in range(2):
        made.step(torch.arange(64.0) + step, "w")


def in_waves(seed=0, **options):
    """Updates of a stage that several pipelines have."""
    torch.manual_seed(seed)
    net = nn.Linear(4, 4)
    made = pipeline.WaveUpdates(net.parameters(), dist.group.WORLD, **{"wave": 2} | options)
    yield net
    for _ in range(4):
        made.updated()


def balanced(kind, **options):
    """A step of the selection bias, of its own or with that of an optimizer."""
    layer = moe_ext.MoELayer(D, F, E, router=mn.TopKRouter(D, E, K, selection_bias=True))
    yield layer
    layer(torch.arange(5.0)[:, None].expand(5, D))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    owner = [optimizer] if kind is mn.register_bias_update else []
    kind(*owner, layer, group=dist.group.WORLD, **options)
    optimizer.step()


def modules_of(**options):
    """A layer of the caller's own experts."""
    experts = [nn.Linear(D, D) for _ in range(E // dist.get_world_size())]
    made = mn.ModuleExperts(experts, ep_group=dist.group.WORLD)
    layer = moe_ext.MoELayer(D, F, E, K, ep_group=dist.group.WORLD, experts=made, **options)
    yield layer
    layer(torch.randn(5, D)).sum().backward()


def meshed(**options):
    """A mesh of all ranks."""
    yield []
    md.MoEMesh(**{"dp": dist.get_world_size()} | options)


def replaced(**options):
    """A model of transformers whose experts lie over the ranks, and a pass."""
    model = small_model("Mixtral", num_local_experts=4)
    yield model
    moe_ext.replace(model, ep_group=dist.group.WORLD, **options)
    model(input_ids=torch.arange(8)[None])


def prepared(**options):
    """A model of transformers under a ring, and a pass."""
    model = small_model("Llama")
    yield model
    attention.prepare_model(model, group=dist.group.WORLD, **options)
    model(input_ids=torch.arange(8)[None])


def registered_ring(**options):
    """A model of transformers whose attention is a ring, and a pass."""
    yield []
    huggingface.register_ring_attention(dist.group.WORLD, **options)
    batch = {"input_ids": torch.arange(8)[None]}
    batch = huggingface.shard_batch(batch, group=dist.group.WORLD)
    small_model("Llama", attn_implementation="moe_ext_ring")(**batch)


def small_model(family, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **options)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def attended_inside(causal=False, **options):
    """Attention of torch inside of `sequence_parallel`."""
    x = torch.ones(1, 2, 4, 4, requires_grad=True)
    yield []
    with attention.sequence_parallel(dist.group.WORLD, **options):
        nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal).sum().backward()


def of_latents(**options):
    """Attention whose keys and values are made of latents."""
    x = [torch.ones(shape) for shape in ((1, 2, 4, 6), (1, 4, 3), (1, 4, 2), (2, 4, 3), (2, 4, 3))]
    yield x
    attention.latent_ring_attention(*x, group=dist.group.WORLD, **options)


def of_packs(**options):
    """Attention of packed documents."""
    x = torch.ones(4, 2, 4, requires_grad=True)
    yield [x]
    offsets = options.pop("cu_seqlens", torch.tensor([0, 8]))
    made = attention.ring_attention_varlen(
        *(x, x, x, offsets, offsets), group=dist.group.WORLD, **options
    )
    made.sum().backward()


def recurring(**options):
    """A recurrence of states."""
    x = {n: torch.ones(1, 2, 4, 3, requires_grad=True) for n in ("q", "k", "v")}
    given = {**x, "g": -torch.ones(1, 2, 4), "beta": torch.ones(1, 2, 4), **options}
    yield []
    attention.gated_delta_rule(**given, group=dist.group.WORLD)[0].sum().backward()


def scanned(**options):
    """A state space."""
    x = {n: torch.ones(1, 2, 4, 3, requires_grad=True) for n in ("x", "B", "C")}
    given = {**x, "dt": torch.ones(1, 2, 4), "A": -torch.ones(2), "D": torch.ones(2), **options}
    yield []
    attention.selective_scan(**given, group=dist.group.WORLD)[0].sum().backward()


def convolved(**options):
    """A short convolution."""
    x = torch.ones(1, 2, 4, requires_grad=True)
    given = {"weight": torch.ones(2, 3), "bias": torch.ones(2), **options}
    yield []
    attention.causal_conv1d(x, **given, group=dist.group.WORLD).sum().backward()


def unsharded(**options):
    """The whole of a sequence."""
    yield []
    attention.unshard_sequence(torch.ones(2, 2), group=dist.group.WORLD, **{"dim": 0} | options)


def sent_from(sources=(0,)):
    """Weights from some ranks to the others."""
    net = ones()
    yield net
    end = sync.DeltaEncoder if dist.get_rank() in sources else sync.DeltaReceiver
    sync.sync_weights(end(net), dist.group.WORLD, sources=sources)


def explained(**options):
    """A choice of a way to exchange keys."""
    yield []
    attention.explain_scheme(*(torch.ones(1, 2, 4, 4),) * 3, group=dist.group.WORLD, **options)


def in_nodes(**options):
    """A mean over nodes of one rank."""
    alone, everyone = dist.new_subgroups(1)[0], dist.group.WORLD
    ranks = {"local_group": everyone, "node_group": alone}
    x = torch.ones(64)
    yield [x]
    compression.hierarchical_all_reduce_(x, reduce=lambda x, **_: x, **ranks, **options)


def clipped(mesh=False, **options):
    """A norm of a layer's gradients."""
    layer = moe_ext.MoELayer(D, F, E, K, ep_group=dist.group.WORLD)
    layer(torch.randn(5, D)).sum().backward()
    md.sync_gradients(layer)
    grads = [p.grad for p in layer.parameters()]
    yield grads
    stages = md.MoEMesh(dp=1, pp=dist.get_world_size())
    md.clip_grad_norm_(layer, **{"max_norm": 0.1, "mesh": stages if mesh else None} | options)


def mean_of(kind, x, **options):
    """A mean over the tokens of all ranks, and back."""
    x[0].requires_grad_().grad = torch.zeros_like(x[0])
    yield [x[0].grad]
    kind(*x, group=dist.group.WORLD, **options).backward()


ADAM = {
    "params": Pair(({}, {"seed": 1})),
    "lr": 0.5,
    "bias_correction": False,
    "betas": (0.5, 0.5),
    "eps": 0.1,
    "eps_inside_sqrt": True,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "block": 64,
    "communication_data_type": torch.bfloat16,
}
ADAM_NAMES = {"params": "parameters"}
IGNORED = {
    "amsgrad": "must be False",
    "cuda_aware": "ignored",
    "comm_backend_name": "ignored",
    "deepspeed": "ignored",
}
RING = {
    "is_causal": True,
    "scale": 0.25,
    "layout": "striped",
    "window": (1, 1),
    "cu_seqlens": [0, 3, 8],
    "key_mask": torch.ones(1, 4, dtype=torch.bool),
    "attn_mask": torch.ones(1, 1, 4, 8, dtype=torch.bool),
    "dropout_p": 0.1,
    "seed": Pair(({"dropout_p": 0.1}, {"seed": 3})),
}
SCHEMES = {
    "prefix_len": Pair(({"is_causal": True}, {"prefix_len": 2})),
    "scheme": "ulysses",
    "precision": "fast",
    "wire": "int8",
}
STATE = {
    "codec": Pair(({"codec": "bf16"}, "int8")),
    "density": Pair(({"codec": "topk"}, 0.5)),
    "policy": compression.Policy(default="bf16"),
    "candidates": ("none", "bf16"),
    "warmup": compression.Warmup(2),
    "nonfinite": "propagate",
    "clip_norm": 1.0,
    "local_clip_norm": Pair(({"codec": "topk"}, 1.0)),
    "optimizer": Pair(({}, {"rate": {"lr": 0.5}})),
    "monitor": compression.ResidualMonitor(every=3),
    "average": False,
    "node_size": 1,
}
STATE_NAMES = {"codec": "codecs", "density": "codecs", "policy": "codecs", "optimizer": "lr"}
PREPARED = {
    "layout": "striped",
    "scheme": "ulysses",
    "precision": "fast",
    "kv_grad_dtype": torch.bfloat16,
    "wire": "int8",
}
CHECKED = {"validate": "compare the arguments of all ranks first", "async_op": "at once"}
ROUNDED = {"format": "int4", "block": 128}
CASES |= {
    optim.OneBitAdam: Case(
        stepped, {**ADAM, "freeze_step": 1, "variance_interval": 4}, names=ADAM_NAMES, free=IGNORED
    ),
    optim.OneBitLamb: Case(
        stepped,
        {
            **ADAM,
            **{"freeze_step": 1, "max_coeff": 5.0, "min_coeff": 0.1, "coeff_beta": 0.5},
            **{"factor_max": 3.0, "factor_min": 0.25, "factor_threshold": 0.2},
        },
        names=ADAM_NAMES,
        free=IGNORED,
    ),
    optim.ZeroOneAdam: Case(
        stepped,
        {
            **ADAM,
            **{"var_freeze_step": 1, "var_update_scaler": 4},
            **{"local_step_scaler": 2, "local_step_clipper": 4},
        },
        names=ADAM_NAMES,
        free=IGNORED,
    ),
    compression.CompressionState: Case(
        reduced,
        STATE,
        names=STATE_NAMES,
        free={
            "grad_scaler": "whose factor the residuals and both bounds follow",
            "cost_model": "None makes one",
            "seed": "of stochastic rounding",
        },
    ),
    compression.zero_plus_plus: Case(
        wrapped,
        {
            "zero_quantized_weights": Pair(({"zero_quantized_weights": False}, True)),
            "zero_quantized_gradients": Pair(({"zero_quantized_gradients": False}, True)),
            "zero_quantized_nontrainable_weights": Pair(({"zero_quantized_weights": False}, True)),
            "zeropp_loco_param": Pair(({}, {"zeropp_loco_param": {}})),
            "weight_format": "int4",
            "gradient_format": "int8",
            "block": 128,
            "error_feedback": True,
            "stochastic": True,
            "seed": 3,
            "keep_dense": functools.partial(bool),
            "min_numel": 8,
            "node_codec": Pair(({"nodes": True}, "bf16")),
            "density": Pair(({"nodes": True, "node_codec": "topk"}, 0.5)),
        },
        names={
            "zeropp_loco_param": "error_feedback",
            "node_codec": "codec",
            "weight_format": "format",
            "gradient_format": "format",
        },
        free={"zero_hpz_partition_size": "checked here"},
    ),
    attention.ring_attention: Case(
        attended_by,
        {
            **RING,
            **SCHEMES,
            "softcap": 1.0,
            "alibi_slopes": torch.ones(2),
            "sinks": torch.ones(2),
            "kv_grad_dtype": torch.bfloat16,
        },
        free={"return_lse": "return (out, lse)"},
    ),
    attention.gated_delta_rule: Case(
        recurring,
        {
            "layout": "striped",
            "cu_seqlens": [0, 3, 8],
            "scale": 2.0,
            "initial_state": torch.ones(1, 2, 3, 3),
            "scheme": "heads",
            "beta": None,
        },
        names={"initial_state": "giving initial_state", "beta": "giving beta"},
    ),
    attention.selective_scan: Case(
        scanned,
        {
            "layout": "striped",
            "cu_seqlens": [0, 3, 8],
            "initial_state": torch.ones(1, 2, 3, 3),
            "scheme": "heads",
            "A": -torch.ones(2, 3),
            "D": None,
        },
        names={"initial_state": "giving initial_state", "A": "a decay by element", "D": "giving D"},
    ),
    attention.causal_conv1d: Case(
        convolved,
        {
            "weight": torch.ones(2, 2),
            "bias": None,
            "activation": "silu",
            "layout": "striped",
            "cu_seqlens": [0, 3, 8],
        },
        names={"weight": "sizes", "bias": "giving bias"},
    ),
    attention.ring_self_attention: Case(attended_by, RING),
    compression.quantized_all_reduce_: Case(
        called, {**ROUNDED, "average": False}, given={"shapes": (512,)}, free=CHECKED
    ),
    compression.quantized_all_gather: Case(
        called, ROUNDED, given={"shapes": (1024, 512)}, free=CHECKED
    ),
    compression.quantized_reduce_scatter: Case(
        called, {**ROUNDED, "average": False}, given={"shapes": (512, 1024)}, free=CHECKED
    ),
    compression.lossless_all_reduce_: Case(
        called, {"average": False}, given={"shapes": (64,)}, free=CHECKED
    ),
    compression.lossless_reduce_scatter: Case(
        called, {"average": False}, given={"shapes": (32, 64)}, free=CHECKED
    ),
    compression.block_sparse_all_reduce_: Case(
        called, {"block": 128, "average": False}, given={"shapes": (512,)}, free=CHECKED
    ),
    pipeline.Pipeline: Case(
        piped,
        {
            "table": pipeline.make_table("1f1b", 2, 3),
            "recompute": True,
            "slice_lengths": Pair(
                (
                    {
                        "table": pipeline.make_table("terapipe", 2, 2, num_slices=2),
                        "slice_lengths": [4, 4],
                    },
                    {"slice_lengths": [3, 5]},
                )
            ),
            "tied": [((0, "weight"), (1, "weight"))],
        },
        free={"max_in_flight": "see `check_table`", "weight_stream": "ranks may differ in it"},
    ),
    grace.grace_from_params: Case(
        coded,
        {
            "compressor": "dgc",
            "memory": "none",
            "compress_ratio": 0.5,
            "communicator": Pair(({"compressor": "none", "memory": "none"}, "allreduce")),
        },
        names={"compress_ratio": "compressor.compress_ratio"},
    ),
    pipeline.WaveUpdates: Case(
        in_waves, {"wave": Pair((2, 4)), "staleness": 1, "parameters": Pair(({}, {"seed": 1}))}
    ),
    mn.update_selection_bias: Case(balanced, {"rate": 0.5, "center": True}),
    mn.register_bias_update: Case(balanced, {"rate": 0.5, "center": True}),
    mn.ModuleExperts: Case(modules_of, {"capacity": 1.0}),
    compression.compress_hook: Case(
        reduced,
        STATE,
        given={"hooked": True},
        names=STATE_NAMES,
        elsewhere={name: "the state's options are varied" for name in ("state", "bucket")},
    ),
    moe_ext.replace: Case(
        replaced,
        {
            "dispatcher": "dedup",
            "combine": Pair(({"dispatcher": "dedup"}, "reduced")),
            "wire": "int8",
            "capacity_factor": 1.0,
            "rebalance": "exact",
            **{
                f"rebalance.{name}": Pair(
                    ({"rebalance": mn.Rebalance()}, {"rebalance": mn.Rebalance(**{name: value})})
                )
                for name, value in {"break_even": 2.0, "every": 7, "hysteresis": 0.5}.items()
            },
        },
    ),
    attention.prepare_model: Case(prepared, PREPARED),
    huggingface.register_ring_attention: Case(
        registered_ring,
        {name: value for name, value in PREPARED.items() if name != "layout"},
        free={"name": "the name"},
        elsewhere={"layout": "positions of another one are refused"},
    ),
    attention.sequence_parallel: Case(
        attended_inside,
        {
            **{name: RING[name] for name in ("layout", "window", "cu_seqlens", "key_mask")},
            **SCHEMES,
            "prefix_len": Pair(({"causal": True}, 2)),
            "softcap": 1.0,
            "kv_grad_dtype": torch.bfloat16,
        },
    ),
    attention.latent_ring_attention: Case(
        of_latents,
        {
            **{name: RING[name] for name in ("is_causal", "scale", "layout", "window")},
            **{name: RING[name] for name in ("cu_seqlens", "key_mask")},
            **SCHEMES,
            "scheme": "all_gather",
            "kv_grad_dtype": torch.bfloat16,
        },
    ),
    attention.ring_attention_varlen: Case(
        of_packs,
        {
            **{name: RING[name] for name in ("layout", "dropout_p", "seed")},
            **{name: SCHEMES[name] for name in ("scheme", "precision", "wire")},
            "prefix_len": Pair(({"causal": True}, {"prefix_len": 2})),
            "attn_mask": torch.ones(1, 4, 8, dtype=torch.bool),
            "softmax_scale": 0.25,
            "causal": True,
            "window_size": (1, 1),
            "softcap": 1.0,
            "alibi_slopes": torch.ones(2),
            "sinks": torch.ones(2),
            "cu_seqlens_q": Pair(({}, {"cu_seqlens": torch.tensor([0, 3, 8])})),
        },
        names={
            "cu_seqlens_q": "cu_seqlens",
            "softmax_scale": "scale",
            "causal": "is_causal",
            "window_size": "window",
        },
        free={f"max_seqlen_{x}": "not needed, and not read" for x in "qk"},
        elsewhere={"cu_seqlens_k": "as cu_seqlens_q"},
    ),
    attention.unshard_sequence: Case(
        unsharded, {"layout": "striped", "cu_seqlens": [0, 1, 4], "dim": 1}
    ),
    sync.sync_weights: Case(sent_from, {"sources": Pair(((0,), (1,)))}),
    attention.explain_scheme: Case(
        explained,
        {
            **{name: RING[name] for name in ("is_causal", "layout", "window", "cu_seqlens")},
            **{name: RING[name] for name in ("key_mask", "attn_mask")},
            "prefix_len": SCHEMES["prefix_len"],
            "kv_grad_dtype": torch.bfloat16,
            "wire": "int8",
        },
    ),
    compression.masked_all_reduce_: Case(
        called,
        {
            "mask": Pair((torch.arange(64) < 8, torch.arange(64) < 9)),
            "average": Pair(({"mask": torch.arange(64) < 8}, False)),
        },
        given={"shapes": (64,)},
        free=CHECKED,
    ),
    compression.row_sparse_all_reduce: Case(
        called, {"average": Pair(({"grad": torch.eye(4).to_sparse(1)}, False))}, free=CHECKED
    ),
    compression.sparse_all_reduce: Case(
        called,
        {
            **{"average": False, "algorithm": "split", "value_codec": "int8"},
            "regions": compression.SplitRegions(256, 2),
            "numel": Pair(({"residual": None}, {"numel": 257})),
        },
        given={
            **{"values_K": torch.ones(8), "indices_K": torch.arange(8), "numel": 256},
            "residual": torch.zeros(256),
        },
        free=CHECKED,
    ),
    compression.hierarchical_all_reduce_: Case(
        in_nodes,
        {"average": False},
        elsewhere={"local_group": "its size is compared", "reduce": "the caller's"},
        free={"validate": "compare the arguments over each group first"},
    ),
    md.clip_grad_norm_: Case(
        clipped,
        {"max_norm": 0.2, "norm_type": float("inf"), "error_if_nonfinite": True, "mesh": True},
    ),
    attention.token_mean_loss: Case(
        mean_of,
        {"grad_scale": 3.0},
        given={"x": lambda: (torch.tensor(6.0), 3)},
        free={"num_tokens": "how many they are"},
    ),
    huggingface.causal_lm_loss: Case(
        mean_of,
        {"grad_scale": 3.0},
        given={"x": lambda: (torch.ones(1, 4, 8), torch.arange(4)[None])},
        free={"ignore_index": "stands for no label"},
    ),
    md.MoEMesh: Case(
        meshed,
        {
            "dp": Pair(({"dp": 1, "ep": 2}, 2)),
            "ep": 2,
            "tp": 2,
            "cp": 2,
            "etp": 2,
            "pp": Pair(({"dp": 1, "ep": 2}, {"ep": 1, "pp": 2})),
            "order": "cp-tp-ep-dp-pp",
        },
        names={"pp": "ep"},
    ),
}
CHECKS = Checks()


def varied(case, argument):
    """Options of the ranks, and of the last one."""
    other = case.other[argument]
    base, other = other if isinstance(other, Pair) else ({}, other)
    base = base if isinstance(base, dict) else {argument: base}
    return base, base | (other if isinstance(other, dict) else {argument: other})


def tensors_of(made):
    """Copies of what a use may not change before it raises."""
    if isinstance(made, nn.Module):
        made = (*made.parameters(), *made.buffers())
    return [local_part(x.detach()).clone() for x in made]


def use(kind, options):
    """Error of a use on this rank, None without one; nothing has changed where it raises."""
    case = CASES[kind]
    options = {
        name: value() if inspect.isfunction(value) else copy.copy(value)
        for name, value in {**case.given, **options}.items()
    }
    if "kind" in arguments_of(case.use):
        options["kind"] = kind
    torch.manual_seed(0)
    made, before = None, []
    try:
        for step, made in enumerate(case.use(**options)):
            if step == 0:
                before = tensors_of(made)
    except ValueError as error:
        after = [] if made is None else tensors_of(made)
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a, b), f"changed before {error}"
        return str(error)
    return None


def check_argument(kind, argument):
    case = CASES[kind]
    mine = varied(case, argument)[dist.get_rank() == dist.get_world_size() - 1]
    name = case.names.get(argument, argument)
    error = use(kind, mine)
    expected = rf"expected .*\b{re.escape(name)}\b.* to be equal on every rank, got .+ on rank 0, "
    assert error and re.search(expected, error), error
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, error)
    assert told == [error] * len(told), told


def check_equal_options(kind):
    base, _ = varied(CASES[kind], next(iter(CASES[kind].other)))
    assert use(kind, base) is None


def last():
    return dist.get_rank() == dist.get_world_size() - 1


@CHECKS()
def check_numbers_that_ranks_measure():
    """Given on some ranks alone, and others on each: all go by those of the first one."""
    slow, fast = (Link.of_rate(rate) for rate in (1e3, 1e15))
    rank = dist.get_rank()
    given = [
        {"link": fast, "flops": 1e3} if rank == 0 else {},
        {"link": fast, "flops": 1e3} if rank == 0 else {"link": slow, "flops": 1e15},
        {"flops": 1e3, "flops_alone": 1e4} if rank == 0 else {"link": slow},
    ]
    # Measured where the first rank has none; one machine's link says nothing here.
    moved.link_of = lambda group, device: fast
    for options in given:
        torch.manual_seed(0)
        layer = moe_ext.MoELayer(
            D,
            F,
            E,
            K,
            ep_group=dist.group.WORLD,
            dispatcher=moe_ext.nn.Dispatch(rebalance=mn.Rebalance(**options)),
        )
        with torch.no_grad():
            layer.router.weight[:2] += 3
        plain = moe_ext.MoELayer(D, F, E, K, ep_group=dist.group.WORLD)
        plain.load_state_dict(layer.state_dict())
        x = torch.randn(20, D) + 1
        torch.testing.assert_close(layer(x), plain(x))
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, layer._rebalancer.rates)
        assert told == told[:1] * len(told)


def refuses_a_change(layer, name, value, text, errors=ValueError):
    """On one rank, after a pass; the layer goes on where it is taken back."""
    path, _, attribute = name.rpartition(".")
    owner, before = layer.get_submodule(path), None
    if last():
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
    with pytest.raises(errors, match=f"expected .*{text}"):
        layer(torch.randn(5, D))
    if last():
        setattr(owner, attribute, before)
    layer(torch.randn(5, D)).sum().backward()


@CHECKS()
def check_options_that_change_later():
    for name, value in (
        ("capacity", mn.Capacity(2.0)),
        ("balance_loss_coef", 0.5),
        ("balance", mn.Balance(coef=0.25)),
        ("router.scale", 2.0),
        ("router.top_groups", 2),
        ("experts.activation", "geglu"),
        ("row_budget", mn.RowBudget(16)),
    ):
        for dispatcher in ("alltoall", "dedup", "auto"):
            (layer,) = [
                *layer_of(dispatcher=dispatcher, router=mn.TopKRouter(D, E, K, num_groups=2))
            ]
            told = "balance.coef" if name.startswith("balance") else name
            text = rf"{told}.* to be equal on every rank, got .* on rank 0, .* on rank 1"
            refuses_a_change(layer, name, value, text)


@CHECKS()
def check_options_that_other_messages_follow_from():
    """Set after a pass: no rank may send what the others do not expect."""
    for dispatcher in ("alltoall", "dedup", "allgather", "auto"):
        budget = "dispatcher to be one of .* with row_budget|to be equal"
        for name, value, text in (
            ("overlap", 2, "overlap to be 1 as in the first forward pass, got 2"),
            ("row_budget", mn.RowBudget(16, static=True), "row_budget.static to be False as"),
            ("row_budget", mn.RowBudget(16), budget),
        ):
            (layer,) = [*layer_of(dispatcher=dispatcher)]
            refuses_a_change(layer, name, value, text, (ValueError, TypeError))


def ones():
    """A module that is alike on all ranks."""
    net = nn.Linear(8, 8)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
    return net


def step(net, made):
    """With a gradient of every parameter that wants one."""
    for p in net.parameters():
        p.grad = torch.ones(p.shape) if p.requires_grad else None
    made.step()


@CHECKS()
def check_rates_that_change():
    """Of replicas that must step alike."""
    for kind in (optim.DeMo, optim.OneBitAdam):
        net = ones()
        made = kind(net.parameters(), lr=0.1)
        step(net, made)
        made.param_groups[0]["lr"] = 0.1 + last()
        before = tensors_of(net)
        text = rf"{kind.__name__}: expected lr to be equal on every rank, got .* on rank 0, .* on"
        with pytest.raises(ValueError, match=text):
            step(net, made)
        assert all(map(torch.equal, before, tensors_of(net)))
        made.param_groups[0]["lr"] = 0.1
        step(net, made)


@CHECKS()
def check_rates_of_shards_that_change():
    """And go back; where lr is that of all, as by a scheduler, nothing is said."""
    for kind in (optim.LAMB, optim.LARS, optim.Adafactor, optim.Muon):
        p = rows_of((4, 6))
        made = kind([p], lr=0.1)
        for lr, other in ((0.1, 0.1), (0.2, 0.2), (0.2, 0.3), (0.1, 0.1)):
            made.param_groups[0]["lr"] = other if last() else lr
            before = local_tensors(made, p)
            if lr == other:
                made.step()
                assert not torch.equal(p.to_local(), before[0])
                continue
            text = f"{kind.__name__}: expected lr to be equal .* got .0.2. on rank 0, .0.3. on"
            with pytest.raises(ValueError, match=text):
                made.step()
            assert all(map(torch.equal, before, local_tensors(made, p)))


@CHECKS()
def check_a_gradient_that_one_rank_has_not():
    """Named on all ranks and nothing changes; without one anywhere a parameter is left alone."""
    for kind in (optim.LAMB, optim.LARS, optim.Adafactor, optim.Muon):
        for first in (True, False):
            params = [rows_of((4, 6)) for _ in range(3)]
            made = kind(params, lr=0.1)
            if not first:
                made.step()
            for absent in ([0], [1, 2], [0, 1, 2]):
                grads = [p.grad for p in params]
                for i in absent if last() else ():
                    params[i].grad = None
                before = [local_tensors(made, p) for p in params]
                text = (
                    f"{kind.__name__}: expected parameters without a gradient to be equal on every "
                    rf"rank, got nothing.* on rank 0, .'parameter {absent[0]} of group 0'"
                )
                with pytest.raises(ValueError, match=text):
                    made.step()
                for p, tensors in zip(params, before, strict=True):
                    assert all(map(torch.equal, tensors, local_tensors(made, p)))
                for p, grad in zip(params, grads, strict=True):
                    p.grad = grad
            params[1].grad = None
            before = [local_tensors(made, p) for p in params]
            made.step()
            for p, tensors in zip(params, before, strict=True):
                assert torch.equal(p.to_local(), tensors[0]) == (p is params[1])
            assert len(local_tensors(made, params[1])) == len(before[1])


def local_tensors(made, p):
    """Copies of a parameter and its state on this rank."""
    found = [p, *(made.state[p][name] for name in sorted(made.state[p]))]
    return [(x.to_local() if hasattr(x, "to_local") else x).detach().clone() for x in found]


class RanksAsGroups:
    """A torchft manager of replica groups of one rank each."""

    def __init__(self):
        self.errors = []

    def start_quorum(self):
        pass

    def allreduce(self, tensor):
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        return self

    def wait(self):
        return True

    def should_commit(self):
        return True

    def report_error(self, error):
        self.errors.append(error)


@CHECKS()
def check_rounds_of_a_manager():
    """No message of a manager tells names and values: each group says its own."""
    cases = (
        ("codec", "codec", "none", "int8"),
        ("sync_every", "sync_every", 2, 4),
        ("fragment_sync_delay", "fragment_sync_delay", 0, 1),
        ("fragment_update_alpha", "fragment_update_alpha", 0.0, 0.5),
        ("outer", "options of outer_optimizer", {"lr": 1.0}, {"lr": 0.5}),
    )
    for argument, name, usual, other in cases:
        for differs in (False, True):
            net, manager = ones(), RanksAsGroups()
            options = {"sync_every": 2, argument: other if differs and last() else usual}
            inner = torch.optim.SGD(net.parameters(), lr=0.1)
            outer = torch.optim.SGD(net.parameters(), **{"lr": 1.0, **options.pop("outer", {})})
            before = tensors_of(net)
            with optim.DiLoCo(manager, [net], inner, outer, **options) as local:
                for _ in range(options["sync_every"] - 1):
                    step(net, inner)
                if not differs:
                    step(net, inner)
                    assert local.round == 1 and not manager.errors
                    continue
                text = f"DiLoCo: expected .*{name} to be equal in every replica group, got"
                with pytest.raises(ValueError, match=text):
                    step(net, inner)
            assert manager.errors and local.round == 0
            assert all(map(torch.equal, before, tensors_of(net)))


@CHECKS()
def check_rounds_that_change():
    """The outer optimizer's rate, or a parameter that is unfrozen later."""
    for change, text in (
        ("rate", "lr of outer_optimizer .* got .* on rank 0, .* on rank 1"),
        ("frozen", "got a later one for bias; .* on rank 1"),
    ):
        net = ones()
        net.bias.requires_grad_(False)
        inner, outer = (torch.optim.SGD(net.parameters(), lr=lr) for lr in (0.1, 1.0))
        with optim.DiLoCo(None, [net], inner, outer, 1):
            step(net, inner)
            if change == "rate":
                outer.param_groups[0]["lr"] = 0.5 + last()
            else:
                net.bias.requires_grad_(last())
            with pytest.raises(ValueError, match=text):
                step(net, inner)


class Counted(nn.Linear):
    """An expert of FastMoE."""

    def __init__(self, dim):
        super().__init__(dim, dim)

    def forward(self, x, count):
        return super().forward(x)


def facades(factor):
    """Layers of other libraries' classes, whose experts take as many rows as a factor says."""
    group, experts = dist.group.WORLD, [nn.Linear(D, D), nn.Linear(D, D)]
    yield mn.upcycle(mn.FeedForward(D, F), 4, 2, capacity_factor=factor, ep_group=group)
    gate = deepspeed.TopKGate(D, 4, 2, capacity_factor=factor)
    yield from (fairscale.MOELayer(one, nn.ModuleList(experts), group) for one in [gate])
    yield deepspeed.MoE(D, nn.Linear(D, D), 4, ep_size=2, k=2, capacity_factor=factor)
    for kind in (paddle.GShardGate, paddle.SwitchGate):
        gate = kind(D, 2, 2, capacity=(factor, factor), group=group)
        yield paddle.MoELayer(D, experts, gate, moe_group=group)
    yield fastmoe.FMoE(2, D, 2, top_k=1 + (factor > 1), expert=[Counted] * 2, moe_group=group)
    yield megablocks.dMoE(
        megablocks.Arguments(
            **{"hidden_size": D, "ffn_hidden_size": F, "moe_num_experts": 4, "fp16": False},
            **{"moe_top_k": 1 + (factor > 1), "moe_expert_model_parallelism": True},
            expert_parallel_group=group,
            # Each rank has its own.
            device="cpu" if last() else None,
        )
    )
    yield tutel.MOELayer(
        {"type": "top", "k": 2, "capacity_factor": factor},
        *(D, {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": F}),
        group=group,
    )


@CHECKS()
def check_facades():
    x = torch.randn(2, 4, D)
    for layer in facades(1.0):
        layer(x)
    for layer in facades(1.0 + last()):
        with pytest.raises(ValueError, match=r"expected .* to be equal on every rank, got .*1"):
            layer(x)


@CHECKS()
def check_plans_of_periodic_balance():
    (layer,) = [*layer_of(dispatcher=mn.Dispatch(rebalance=mn.Rebalance("periodic", every=1)))]
    if last():
        mn.update_placement(layer)
    with pytest.raises(
        ValueError, match="calls of update_placement .* got 0 on rank 0, 1 on rank 1"
    ):
        layer(torch.randn(5, D))
    if not last():
        mn.update_placement(layer)
    layer(torch.randn(5, D))
    layer.train(not last())
    with pytest.raises(ValueError, match="training.* got True on rank 0, False on rank 1"):
        layer(torch.randn(5, D))


for _kind, _case in CASES.items():
    CHECKS[f"{_kind.__name__}-equal"] = functools.partial(check_equal_options, _kind)
    for _argument in _case.other:
        _check = functools.partial(check_argument, _kind, _argument)
        CHECKS[f"{_kind.__name__}-{_argument}"] = _check


def test_each_public_name_that_takes_ranks_has_a_case_or_a_reason():
    """A new one that is in no list fails here."""
    found = {
        f"{module}.{name}": value
        for module, name, value in public()
        if callable(value) and RANKS & set(arguments_of(value))
    }
    unknown = [name for name, value in found.items() if value not in CASES and name not in EXEMPT]
    assert not unknown, f"no case, and no reason in EXEMPT: {unknown}"
    stale = [name for name in EXEMPT if name not in found or found[name] in CASES]
    assert not stale, f"not there any more, or with a case: {stale}"


@pytest.mark.parametrize("name", EXEMPT)
def test_reasons_are_true(name):
    """A test that is named exists and names what it stands for."""
    module, _, own = name.rpartition(".")
    value, reason = getattr(sys.modules[module], own), EXEMPT[name]
    text = " ".join((value.__doc__ or "").split())
    if reason.startswith("tests/"):
        path, _, function = reason.partition("::")
        lines = (Path(__file__).parents[1] / path).read_text()
        found = re.search(rf"^(def |class |){function}\b.*?(?=^\S|\Z)", lines, re.M | re.S)
        assert found, f"{path} has no {function}"
        assert re.search(rf"\b{own}\b", found[0]), f"{reason} does not name {own}"
    elif reason.startswith("made by "):
        made = reason.removeprefix("made by ")
        assert made in {kind.__name__ for kind in CASES}
    elif reason == _COMPARES_NOTHING:
        assert reason.lower() in text.lower(), text


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_each_argument_is_varied_or_free(kind):
    case = CASES[kind]
    listed = {*case.other, *case.free, *case.elsewhere, *OF_A_RANK}
    left = [argument for argument in arguments_of(kind) if argument not in listed]
    assert not left, f"{kind.__name__}: {left} neither differ in a case nor are free to"
    # Those of a class that takes the arguments of another are told there.
    docs = [one.__doc__ for one in getattr(kind, "__mro__", ())]
    docs += [one.__doc__ for one in vars(sys.modules[kind.__module__]).values()]
    text = " ".join(" ".join(filter(None, docs)).split())
    for argument, words in case.free.items():
        assert words in text, f"{kind.__name__}.{argument}: no docstring says {words!r}"


test_over_ranks = CHECKS.test(2, group_timeout=20, timeout=200)
