"""Classes of other libraries take their arguments, each served or refused by its name."""

import copy
import functools
import importlib
import inspect
import pkgutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_ext import integrations
from moe_ext.integrations import deepspeed, fairscale, fastmoe, megablocks, paddle, tutel
from moe_ext.integrations._base import activate

DIM, TOKENS = 8, 24

# Arguments in the order of the originals: deepspeed 0.19.8, fairscale 0.4.13, FastMoE 1.1, Tutel
# 0.3, MegaBlocks 0.7, PaddlePaddle 2.6, grace_dl.dist; self left out. OTHERS has more.
GATE = ("d_model", "num_expert", "world_size")
SIGNATURES = {
    "deepspeed.MoE.forward": ("hidden_states", "used_token"),
    "deepspeed.MoE.set_deepspeed_parallelism": ("use_data_before_expert_parallel_",),
    "deepspeed.TopKGate": (
        *("model_dim", "num_experts", "k", "capacity_factor", "eval_capacity_factor"),
        *("min_capacity", "noisy_gate_policy", "drop_tokens", "use_rts", "ep_group"),
        "top2_2nd_expert_sampling",
    ),
    "deepspeed.has_moe_layers": ("m",),
    "deepspeed.is_moe_param": ("param",),
    "deepspeed.is_moe_param_group": ("param_group",),
    "deepspeed.configure_moe_param_groups": ("model_parameters",),
    "deepspeed.split_params_into_different_moe_groups_for_optimizer": (
        "param_groups",
        "max_group_size",
    ),
    "fairscale.MOELayer.forward": ("input",),
    "fairscale.Top2Gate": ("model_dim", "num_experts"),
    "fastmoe.FMoE.forward": ("moe_inp",),
    "fastmoe.FMoE.mark_parallel_comm": ("expert_dp_comm",),
    "fastmoe.FMoELinear": ("num_expert", "in_feat", "out_feat", "bias", "rank"),
    "fastmoe.FMoELinear.forward": ("inp", "fwd_expert_count"),
    "fastmoe.NaiveGate": (*GATE, "top_k", "gate_bias"),
    "fastmoe.GShardGate": (*GATE, "topk", "capacity", "random_routing", "gate_bias"),
    "fastmoe.SwitchGate": (*GATE, "topk", "switch_eps", "capacity", "gate_bias"),
    "megablocks.LearnedRouter": ("args",),
    "megablocks.dMoE": ("args",),
    "megablocks.dMoE.forward": ("x",),
    "megablocks.from_megatron": ("megatron_args",),
    "megablocks.batched_load_balancing_loss": ("args",),
    "megablocks.clear_load_balancing_loss": (),
    "megablocks.batched_router_zloss": ("args",),
    "megablocks.clear_router_zloss": (),
    "paddle.MoELayer.forward": ("inp",),
    "paddle.NaiveGate": (*GATE, "topk"),
    "paddle.GShardGate": (*GATE, "topk", "capacity", "random_routing", "group"),
    "paddle.SwitchGate": (*GATE, "topk", "switch_eps", "capacity", "group"),
    "tutel.MOELayer.forward": (
        *("input", "gate_index", "capacity_factor", "top_k", "a2a_ffn_overlap_degree"),
        *("reserve_dims", "inequivalent_tokens", "adaptive_r", "megablocks_size"),
    ),
    "tutel.MOELayer.get_parameter_iterator": ("param_type",),
    "grace.grace_from_params": ("params",),
    "grace.Allgather": ("compressor", "memory", "world_size"),
    "grace.Allreduce": ("compressor", "memory", "world_size"),
    "grace.Communicator": ("compressor", "memory", "world_size"),
    "grace.Compressor": ("average", "tensors_size_are_same"),
    "grace.DgcCompressor": ("compress_ratio",),
    "grace.DgcMemory": ("momentum", "gradient_clipping", "world_size"),
    "grace.FP16Compressor": ("average", "tensors_size_are_same"),
    "grace.NoneCompressor": ("average", "tensors_size_are_same"),
    "grace.NoneMemory": (),
    "grace.OneBitCompressor": (),
    "grace.PowerSGDCompressor": (),
    "grace.QSGDCompressor": ("quantum_num",),
    "grace.RandomKCompressor": ("compress_ratio",),
    "grace.ResidualMemory": ("beta", "gamma"),
    "grace.SignSGDCompressor": (),
    "grace.SignumCompressor": ("momentum",),
    "grace.ThresholdCompressor": ("threshold",),
    "grace.TopKCompressor": ("compress_ratio",),
}
# Modules and names that are not another library's.
OWN = {
    "deepspeed_config": "reads DeepSpeed's JSON; tests/integrations/test_deepspeed_config.py",
    "horovod": "tests/integrations/test_horovod.py has its signatures",
    "huggingface": "functions of our own for transformers' models",
    "lightning": "classes of our own for Lightning's strategies; distributed/test_lightning.py",
    "state_dict": "functions of our own for files of others",
    "torchft": "functions of our own for torchft's Manager",
    "grace.BlockQuantizer": "formats of our own by GRACE's interface",
    "grace.Context": "facts of our own for decoders",
    "grace.Memory": "the interface of memories; it takes nothing",
}


def facades():
    """Names of the classes and functions of all facades, found in the package."""
    for info in pkgutil.iter_modules(integrations.__path__):
        if info.name.startswith("_") or info.name in OWN:
            continue
        module = importlib.import_module(f"{integrations.__name__}.{info.name}")
        for name, value in vars(module).items():
            own = getattr(value, "__module__", "") == module.__name__
            full = f"{info.name}.{name}"
            if own and callable(value) and not name.startswith("_") and full not in OWN:
                yield full


class Wide(nn.Module):
    """An expert that is no copy of another."""

    def __init__(self, seed=0, dim=DIM):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(dim, dim, generator=generator))

    def forward(self, x, count=None):
        return torch.tanh(x @ self.w)


def made_deepspeed(**options):
    return deepspeed.MoE(**{"hidden_size": DIM, "expert": Wide(), "num_experts": 4, **options})


def made_fairscale(**options):
    gate = fairscale.Top2Gate(DIM, 4)
    experts = nn.ModuleList(Wide(seed) for seed in range(4))
    return fairscale.MOELayer(**{"gate": gate, "experts": experts, **options})


def made_fastmoe(**options):
    return fastmoe.FMoE(
        **{
            "num_expert": 4,
            "d_model": DIM,
            "expert": [functools.partial(Wide, i) for i in range(4)],
            **options,
        }
    )


def made_fastmoe_mlp(**options):
    return fastmoe.FMoETransformerMLP(
        **{"num_expert": 4, "d_model": DIM, "d_hidden": 16, **options}
    )


def made_megablocks(**options):
    options = {"hidden_size": DIM, "ffn_hidden_size": 16, "moe_num_experts": 4, **options}
    return megablocks.dMoE(megablocks.Arguments(**{"fp16": False, "moe_top_k": 2, **options}))


def made_paddle(**options):
    experts = [Wide(seed) for seed in range(4)]
    return paddle.MoELayer(**{"d_model": DIM, "experts": experts, **options})


def made_tutel(**options):
    gate = {"type": "top", "k": 2, "capacity_factor": 0.5, "gate_noise": 1.0}
    experts = {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 16}
    return tutel.moe_layer(
        **{"gate_type": gate, "model_dim": DIM, "experts": experts, "seeds": (1, 2, 3), **options}
    )


COSINE = {"type": "cosine_top", "k": 2, "proj_dim": 4}


@pytest.mark.parametrize(
    "make",
    [
        made_fairscale,
        made_fastmoe,
        made_fastmoe_mlp,
        made_megablocks,
        made_paddle,
        made_tutel,
        functools.partial(made_tutel, gate_type=COSINE),
    ],
)
def test_routers_are_drawn_anew_as_they_were_drawn(make):
    """Layers that were made on the meta device begin by this call."""
    router = make().router
    torch.manual_seed(1)
    router.reset_parameters()
    drawn = copy.deepcopy(router.state_dict())
    for parameter in router.parameters():
        nn.init.constant_(parameter, 7.0)
    torch.manual_seed(1)
    router.reset_parameters()
    for name, value in router.state_dict().items():
        assert torch.equal(value, drawn[name]) and not (value == 7.0).any(), name


class Doubled(nn.Linear):
    """Another kind of linear layer."""

    def forward(self, x):
        return 2 * super().forward(x)


def halved(x):
    return x / 2


SEEN = []
# For each class: how it is made, and another value for each of its arguments in the order of the
# original, with others that it needs to bind. Sizes and experts are those of `made_...`.
OTHERS = {
    "deepspeed.MoE": (
        made_deepspeed,
        {
            "hidden_size": ({"hidden_size": 4, "expert": Wide(dim=4)}, {}),
            "expert": (Wide(5), {}),
            "num_experts": (2, {}),
            "ep_size": (2, {}),
            "k": (2, {}),
            "capacity_factor": (0.5, {}),
            "eval_capacity_factor": (0.5, {"eval": True}),
            "min_capacity": (20, {"capacity_factor": 0.5}),
            "use_residual": (True, {}),
            "noisy_gate_policy": ("Jitter", {}),
            "drop_tokens": (False, {"capacity_factor": 0.2}),
            "use_rts": (False, {"capacity_factor": 0.5}),
            "use_tutel": (True, {}),
            "enable_expert_tensor_parallelism": (True, {}),
            "top2_2nd_expert_sampling": (False, {"k": 2}),
        },
    ),
    "fairscale.MOELayer": (
        made_fairscale,
        {
            "gate": (nn.Linear(DIM, 4), {}),
            "experts": (nn.ModuleList(Wide(9 + seed) for seed in range(4)), {}),
            "group": ("a group", {}),
        },
    ),
    "fastmoe.FMoE": (
        made_fastmoe,
        {
            "num_expert": ({"num_expert": 2, "expert": functools.partial(Wide, 3)}, {}),
            "d_model": (4, {}),
            "world_size": (2, {}),
            "mp_group": ("a group", {}),
            "slice_group": ("a group", {}),
            "moe_group": ("a group", {}),
            "top_k": (1, {}),
            "gate": (fastmoe.GShardGate, {}),
            "expert": (functools.partial(Wide, 7), {}),
            "gate_hook": (lambda *_: SEEN.append(1), {}),
            "mask": (torch.ones(3), {}),
            "mask_dict": ({0: 1}, {}),
            "gate_bias": (False, {}),
        },
    ),
    "fastmoe.FMoETransformerMLP": (
        made_fastmoe_mlp,
        {
            "num_expert": (2, {}),
            "d_model": (4, {}),
            "d_hidden": (8, {}),
            "activation": (nn.ReLU(), {}),
            "expert_dp_comm": ("dp", {}),
            "expert_rank": (1, {}),
            "kwargs": ({"top_k": 1}, {}),
        },
    ),
    "megablocks.Arguments": (
        made_megablocks,
        {
            "hidden_size": (4, {}),
            "ffn_hidden_size": (8, {}),
            "num_layers": (2, {}),
            "bias": (False, {}),
            "return_bias": (False, {}),
            "activation_fn": (F.relu, {}),
            "moe_num_experts": (2, {}),
            "moe_top_k": (1, {}),
            "moe_capacity_factor": (2, {}),
            "moe_normalize_expert_weights": (1.0, {}),
            "moe_loss_weight": (0.5, {}),
            "moe_jitter_eps": (0.1, {}),
            "moe_lbl_in_fp32": (True, {}),
            "moe_expert_model_parallelism": (True, {}),
            "expert_parallel_group": ("a group", {}),
            "pipeline_model_parallel_size": (2, {"num_layers": 2}),
            "num_layers_per_virtual_pipeline_stage": (2, {}),
            "memory_optimized_mlp": (True, {}),
            "mlp_type": ("glu", {}),
            "mlp_impl": ("sparse", {}),
            "fp16": (True, {}),
            "bf16": (True, {}),
            "device": ("meta", {}),
            "init_method": (nn.init.ones_, {}),
            "output_layer_init_method": (nn.init.ones_, {}),
            "uniform_expert_assignment": (True, {}),
            "shared_expert": (True, {"return_bias": False}),
            "fc_cls": (Doubled, {"shared_expert": True, "return_bias": False}),
            "fc_kwargs": ({"bias": False}, {"shared_expert": True, "return_bias": False}),
            "remat_act_fn": (False, {}),
            "shared_expert_hidden_size": (8, {"shared_expert": True, "return_bias": False}),
            "shared_expert_weighted_sum": (True, {"shared_expert": True, "return_bias": False}),
            "moe_zloss_weight": (0.5, {}),
            "moe_zloss_in_fp32": (True, {}),
        },
    ),
    "paddle.MoELayer": (
        made_paddle,
        {
            "d_model": ({"d_model": 4, "experts": [Wide(s, 4) for s in range(4)]}, {}),
            "experts": ([Wide(9 + seed) for seed in range(4)], {}),
            "gate": ({"type": "switch", "top_k": 1}, {}),
            "moe_group": ("a group", {}),
            "mp_group": ("a group", {}),
            "recompute_interval": (1, {}),
            "recompute_ctx": ({"offload": True}, {}),
        },
    ),
    "tutel.MOELayer": (
        made_tutel,
        {
            "gate_type": ({"type": "top", "k": 1}, {}),
            "model_dim": (4, {}),
            "experts": (
                {"type": "llama_ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 16},
                {},
            ),
            "scan_expert_func": (lambda *_: SEEN.append(1), {}),
            "result_func": (halved, {}),
            "group": ("a group", {}),
            "seeds": ((7, 8, 9), {}),
            "a2a_ffn_overlap_degree": (2, {}),
            "is_postscore": (False, {}),
            "batch_prioritized_routing": (True, {}),
            "normalize_gate": (False, {}),
            "is_gshard_loss": (False, {}),
            "parallel_type": ("data", {}),
            "use_2dh": (True, {}),
        },
    ),
}
SIGNATURES |= {name: tuple(others) for name, (_, others) in OTHERS.items()}
# Without an effect on a result, as in the original: documented where the class is.
WITHOUT_EFFECT = {
    ("megablocks.Arguments", "moe_capacity_factor"): "dMoE drops nothing",
    ("megablocks.Arguments", "moe_lbl_in_fp32"): "losses are in float32",
    ("megablocks.Arguments", "moe_zloss_in_fp32"): "losses are in float32",
    ("megablocks.Arguments", "moe_expert_model_parallelism"): "one rank holds all experts",
    ("megablocks.Arguments", "mlp_impl"): "one way to the same result",
    ("megablocks.Arguments", "memory_optimized_mlp"): "recomputes, with the same result",
    ("megablocks.Arguments", "remat_act_fn"): "of the recomputation",
    ("megablocks.Arguments", "moe_zloss_weight"): "of batched_router_zloss",
    ("paddle.MoELayer", "recompute_interval"): "recomputes, with the same result",
    ("tutel.MOELayer", "parallel_type"): "the same for experts that are not split",
}


def results(make, options, evaluate=False):
    """What a layer gives under fixed random numbers: tensors, names of parameters, marks."""
    SEEN.clear()
    torch.manual_seed(0)
    layer = make(**options)
    layer.train(not evaluate)
    dim = options.get("hidden_size", options.get("d_model", options.get("model_dim", DIM)))
    x = torch.randn(2, TOKENS // 2, dim, generator=torch.Generator().manual_seed(1))
    megablocks.clear_load_balancing_loss()
    megablocks.clear_router_zloss()
    dtype = next(layer.parameters()).dtype
    found = layer(x.to(next(layer.parameters()).device, dtype))
    found = list(found) if isinstance(found, tuple) else [found]
    if isinstance(layer, megablocks.dMoE) and not x.is_meta:
        try:
            found.append(torch.as_tensor(megablocks.batched_load_balancing_loss(layer.args)))
        except ValueError as error:
            SEEN.append(str(error))
    found.append(getattr(layer, "l_aux", None))
    marks = [
        (name, p.shape, p.dtype, p.device, getattr(p, "dp_comm", None))
        for name, p in layer.named_parameters()
    ]
    return found, marks, list(SEEN)


def differ(one, other):
    tensors = [
        (a is None) != (b is None)
        or (
            a is not None
            and (a.is_meta or b.is_meta or a.shape != b.shape or not torch.equal(a, b))
        )
        for a, b in zip(one[0], other[0], strict=False)
    ]
    return any(tensors) or len(one[0]) != len(other[0]) or one[1:] != other[1:]


def test_every_facade_is_listed():
    listed = {name for name in SIGNATURES if name.count(".") == 1}
    aliases = {"tutel.moe_layer"}
    assert set(facades()) - aliases == listed


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_those_of_the_original_in_its_order(name):
    """Further arguments come behind, or by name alone, and have a default."""
    module, *path = name.split(".")
    value = functools.reduce(
        getattr, path, importlib.import_module(f"{integrations.__name__}.{module}")
    )
    parameters = list(inspect.signature(value).parameters.values())
    if len(path) > 1:
        parameters = parameters[1:]
    wanted = SIGNATURES[name]
    assert tuple(p.name for p in parameters[: len(wanted)]) == wanted
    for extra in parameters[len(wanted) :]:
        variadic = extra.kind in (extra.VAR_POSITIONAL, extra.VAR_KEYWORD)
        assert variadic or extra.default is not extra.empty, extra


@pytest.mark.parametrize(
    ("name", "argument"), [(name, arg) for name, (_, others) in OTHERS.items() for arg in others]
)
def test_an_argument_counts_or_is_refused_by_its_name(name, argument):
    make, others = OTHERS[name]
    value, needed = others[argument]
    needed = dict(needed)
    evaluate = needed.pop("eval", False)
    options = (
        value if isinstance(value, dict) and argument in (*value, "kwargs") else {argument: value}
    )
    base = results(make, needed, evaluate)
    try:
        found = results(make, {**needed, **options}, evaluate)
    except (TypeError, ValueError) as error:
        words = str(error)
        assert argument in words or "group" in argument and "group" in words, words
        return
    if (name, argument) in WITHOUT_EFFECT:
        assert not differ(base, found)
    else:
        assert differ(base, found)


def test_an_activation_of_the_users_runs_its_own_forward():
    class Twice(nn.SiLU):
        def forward(self, x):
            return 2 * super().forward(x)

    x = torch.randn(4, 6)
    torch.testing.assert_close(activate(x, Twice()), 2 * F.silu(x))
    torch.testing.assert_close(activate(x, nn.SiLU()), F.silu(x))
