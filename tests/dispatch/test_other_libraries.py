"""The layers of other libraries on two ranks give what one process gives."""

import re

import torch
import torch.distributed as dist
from rank_checks import Checks, full, raised
from torch import nn

import moe_ext
from moe_ext.distributed.dtensor import local_part
from moe_ext.integrations import deepspeed, fairscale, fastmoe, megablocks, paddle, tutel

D, E, H = 8, 4, 6
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


class Expert(nn.Sequential):
    def __init__(self, d_model=D):
        super().__init__(nn.Linear(d_model, H), nn.GELU(), nn.Linear(H, d_model))

    def forward(self, x, count=None):
        return super().forward(x)


def tokens(*lengths):
    """One batch a rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, n, D, dtype=torch.float64, generator=generator) for n in lengths]


def own_part(name, tensors, rank, num_ranks):
    """What a rank holds under `name`, of the tensors of a layer with all experts."""
    number = re.search(r"experts\.(\d+)\.", name)
    if number:
        index = int(number[1])
        whole = f"experts.{index + rank * E // num_ranks}."
        return tensors[name.replace(number[0], whole)]
    # MegaBlocks' bias lies beside the experts, and every rank has it whole.
    if "experts." in name and name != "experts.bias":
        return tensors[name].chunk(num_ranks)[rank]
    return tensors[name]


def pair(build):
    """A layer on both ranks, and one with all experts on each: the same weights, float64."""
    spread, alone = build(dist.group.WORLD).double().eval(), build(None).double().eval()
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randn(p.shape, dtype=torch.float64, generator=generator)
        for name, p in alone.named_parameters()
    }
    with torch.no_grad():
        for layer, ranks, rank in ((alone, 1, 0), (spread, 2, dist.get_rank())):
            for name, parameter in layer.named_parameters():
                local_part(parameter).copy_(own_part(name, values, rank, ranks))
    return spread, alone


def compare(build, run, inputs=None, *, together=False):
    """Outputs and gradients of both must agree; returns the number of dropped slots.

    `run(layer, x)` returns the output and the objective. With `together` the layer with all experts
    gets the tokens of both ranks at once: for capacities that hold for all ranks.
    """
    rank = dist.get_rank()
    inputs = tokens(9, 12) if inputs is None else inputs
    spread, alone = pair(build)
    y, objective = run(spread, inputs[rank])
    objective.backward()
    moe_ext.distributed.sync_gradients(spread)
    if together:
        whole, total = run(alone, torch.cat(inputs, dim=1))
        expected = whole.split([x.shape[1] for x in inputs], dim=1)[rank]
    else:
        results = [run(alone, x) for x in inputs]
        expected, total = results[rank][0], sum(objective for _, objective in results)
    torch.testing.assert_close(y, expected, **TIGHT)
    (total / 2).backward()
    wanted = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in alone.named_parameters()
    }
    for name, parameter in spread.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = local_part(found.detach())
        torch.testing.assert_close(found, own_part(name, wanted, rank, 2), msg=name, **TIGHT)
    dropped = spread.metrics["num_dropped"].clone()
    dist.all_reduce(dropped)
    return int(dropped)


def plain(layer, x):
    y = layer(x)
    return y, y.square().sum()


def with_l_aux(layer, x):
    y = layer(x)
    return y, y.square().sum() + layer.l_aux


def this_rank():
    """A group of this rank alone."""
    return [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]


def check_deepspeed():
    def build(group):
        return deepspeed.MoE(
            D,
            Expert(),
            E,
            ep_size=1 if group is None else 2,
            k=2,
            eval_capacity_factor=0.6,
            min_capacity=1,
            use_residual=True,
            top2_2nd_expert_sampling=False,
        )

    def run(layer, x):
        y, l_aux, _ = layer(x)
        return y, y.square().sum() + l_aux

    assert compare(build, run) > 0


def check_fairscale():
    class Seeded(fairscale.Top2Gate):
        def forward(self, x_TD, **kwargs):
            torch.manual_seed(0)
            return super().forward(x_TD, **kwargs)

    alone = this_rank()

    def build(group):
        experts = nn.ModuleList(Expert() for _ in range(E if group is None else E // 2))
        return fairscale.MOELayer(Seeded(D, E), experts, group or alone)

    assert compare(build, with_l_aux) > 0


def check_paddle():
    for kind in ("naive", "gshard"):

        def build(group, kind=kind):
            experts = [Expert() for _ in range(E if group is None else E // 2)]
            layer = paddle.MoELayer(D, experts, {"type": kind, "top_k": 2}, moe_group=group)
            layer.gate.random_routing = False
            return layer

        assert compare(build, plain) == 0


def check_paddle_serves_the_ranks_in_their_order():
    rank, (x, y) = dist.get_rank(), tokens(9, 12)
    experts = [Expert() for _ in range(E // 2)]
    layer = paddle.MoELayer(D, experts, {"type": "switch", "top_k": 1}, moe_group=dist.group.WORLD)
    layer.gate.capacity = (1.2, 0.5)
    with torch.no_grad():
        layer.gate.gate.weight.zero_()
        layer.gate.gate.bias.copy_(torch.tensor([0.0, 5.0, 0.0, 0.0]))
    layer.double().eval()((x, y)[rank])
    # ceil(9 / 2) rows of the first rank; ceil(12 / 2) less the 9 that asked before the second.
    assert layer.metrics["num_dropped"] == (9 - 5 if rank == 0 else 12)


def check_fastmoe_switch_has_one_capacity_for_all_ranks():
    def build(group):
        ranks = 1 if group is None else 2
        layer = fastmoe.FMoE(
            E // ranks, D, ranks, moe_group=group, top_k=1, gate=fastmoe.SwitchGate, expert=Expert
        )
        layer.gate.capacity = (1.0, 0.7)
        return layer

    assert compare(build, plain, tokens(12, 12), together=True) > 0


def check_fmoe_transformer_mlp():
    def build(group):
        ranks = 1 if group is None else 2
        return fastmoe.FMoETransformerMLP(E // ranks, D, H, world_size=ranks, moe_group=group)

    assert compare(build, plain) == 0


def check_tutel():
    alone = this_rank()

    def build(group):
        experts = {
            "type": "ffn",
            "num_experts_per_device": E if group is None else E // 2,
            "hidden_size_per_expert": H,
        }
        gate = {"type": "top", "k": 2, "capacity_factor": 0.6}
        return tutel.moe_layer(gate, D, experts, group=group or alone)

    assert compare(build, with_l_aux) > 0


def check_tutel_takes_the_capacity_of_the_largest_rank():
    layer = tutel.moe_layer(
        {"type": "top", "k": 1, "capacity_factor": 1.0},
        D,
        {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": H},
        group=dist.group.WORLD,
    )
    with torch.no_grad():
        layer.gates.get_submodule("0").wg.weight.zero_()
    x = tokens(5, 12)[dist.get_rank()].float()
    # All tokens tie for expert 0, which takes 12 / 4 of each rank; of the first alone 5 / 4.
    for options, taken in (({"inequivalent_tokens": True}, (3, 3)), ({}, (2, 3))):
        layer(x, **options)
        assert layer.metrics["num_dropped"] == x.shape[1] - taken[dist.get_rank()]


def check_megablocks():
    def build(group):
        args = megablocks.Arguments(
            hidden_size=D,
            ffn_hidden_size=H,
            moe_num_experts=E,
            moe_top_k=2,
            mlp_type="glu",
            fp16=False,
            return_bias=False,
            moe_expert_model_parallelism=group is not None,
            expert_parallel_group=group,
        )
        return megablocks.dMoE(args)

    assert compare(build, plain) == 0
    layers = [build(dist.group.WORLD), build(None)]
    for layer in layers:
        torch.manual_seed(3)
        layer.experts.reset_parameters()
    assert torch.equal(full(layers[0].experts.mlp.w1), layers[1].experts.mlp.w1)


def check_groups_that_do_not_fit():
    group = dist.group.WORLD
    args = megablocks.Arguments(
        moe_num_experts=3, moe_expert_model_parallelism=True, expert_parallel_group=group
    )
    for text, build in (
        ("ep_size to divide the number of ranks, 2", lambda: deepspeed.MoE(D, Expert(), 3, 3)),
        (
            "world_size to be the size of moe_group, 2, got 1",
            lambda: fastmoe.FMoE(2, D, 1, moe_group=group, expert=Expert),
        ),
        (
            "mp_group to be None or a group of one rank",
            lambda: paddle.MoELayer(D, [Expert()], mp_group=group),
        ),
        (
            "gate to be for 2 experts",
            lambda: fairscale.MOELayer(fairscale.Top2Gate(D, 4), Expert(), group),
        ),
        ("moe_num_experts to be a multiple", lambda: megablocks.dMoE(args)),
    ):
        raised(ValueError, text, build)


test_two_ranks_give_what_one_process_gives = Checks.of(globals()).test(2)
