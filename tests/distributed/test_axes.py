"""Pipeline stages and tensor-parallel layers around experts over ranks, against one process."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairwise import FULL
from rank_checks import Checks, full, shared_folder
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import moe_ext
from moe_ext import distributed as md
from moe_ext.attention import SequenceParallelMLP
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn.model_layers import moe_layers

DIM, EXPERTS, ROWS, MICRO, STEPS = 8, 4, 6, 4, 2
# Micro-batches without a pipeline: one that is added to another.
SUM = 2
# Blocks and micro-batches of one process, for pipeline stages and for shards.
STAGES, SHARDS = (4, MICRO), (2, SUM)
# Some thousand roundings of 1e-16.
TIGHT = {"rtol": 1e-10, "atol": 1e-13}
CHECKS = Checks()


class Dense(nn.Module):
    """A norm and two layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    """Dense layers, and experts behind them or not."""

    def __init__(self, ep_group, has_experts, sequence):
        super().__init__()
        self.mlp = Dense()
        if sequence is not None:
            (group,) = sequence
            self.mlp = SequenceParallelMLP(DIM, 12, group=group, grad_reduction="mean")
        self.moe = None
        if has_experts:
            router = moe_ext.nn.TopKRouter(DIM, EXPERTS, 2, selection_bias=True)
            # The balance loss of a shard is another one than that of its sequence.
            options = {
                "balance": moe_ext.nn.Balance(coef=0.01 if sequence is None else 0.0, z_coef=0.1)
            }
            options |= {"router": router, "shared_expert": 4, "ep_group": ep_group}
            if ep_group is not None:
                options["dispatcher"] = "alltoall"
            self.moe = moe_ext.MoELayer(DIM, 6, EXPERTS, **options)

    def forward(self, x):
        x = x + self.mlp(x)
        return x if self.moe is None else x + self.moe(x)


class Model(nn.Module):
    """A dense block, and others with experts; those that are kept, under their names in the whole.

    `sequence`: the group, alone in a tuple, of Megatron's sequence parallelism.
    """

    def __init__(self, ep_group=None, kept=range(2), sequence=None):
        super().__init__()
        torch.manual_seed(3)
        blocks = {str(i): Block(ep_group, i > 0, sequence) for i in range(max(kept) + 1)}
        self.blocks = nn.ModuleDict(blocks)
        self.double()
        for i in set(range(max(kept))) - set(kept):
            del self.blocks[str(i)]

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


@functools.cache
def mesh_of(**sizes):
    """The mesh of these sizes, whose groups cost more than a small model."""
    return md.MoEMesh(**sizes)


def data(step, rank, size):
    """Inputs and labels of a rank, all of its micro-batches; other rows on every rank."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, size, MICRO * ROWS, DIM, generator=generator, dtype=torch.float64)
    return x[rank], y[rank]


@functools.cache
def one_process(size, shape, sequence=None):
    """Losses, gradient norms and weights of training in one process, with biases."""
    num_blocks, micro = shape
    model, norms, losses = Model(kept=range(num_blocks), sequence=sequence), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moe_ext.nn.set_loss_scale(model, 1 / (size * micro))
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            pairs = zip(*(t.chunk(micro) for t in data(step, rank, size)), strict=True)
            for x, y in pairs:
                loss = F.mse_loss(model(x), y)
                (loss / (size * micro)).backward()
                losses.append(loss.detach())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        moe_ext.nn.update_selection_bias(model)
    return torch.stack(losses), torch.stack(norms), model


def assert_equals_one_process(model, norms, size, shape, sequence=None):
    _, wanted, whole = one_process(size, shape, sequence)
    torch.testing.assert_close(torch.stack(norms).double(), wanted.double(), **TIGHT)
    state = whole.state_dict()
    for name, tensor in md.full_state_dict(model).items():
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(tensor, state[name], msg=message, **TIGHT)
        if name.endswith("selection_bias"):
            assert tensor.any()


# Blocks of every stage on the ranks of either half.
PARTS = {
    "halves": [{0: (0, 1)}, {1: (2, 3)}],
    "first without experts": [{0: (0,)}, {1: (1, 2, 3)}],
    "in turn": [{0: (0,), 2: (2,)}, {1: (1,), 3: (3,)}],
    "and back": [{0: (0,), 3: (3,)}, {1: (1,), 2: (2,)}],
}


@CHECKS(
    ("GPipe", "halves"),
    ("1F1B", "halves"),
    ("1F1B", "halves", "in DistributedDataParallel"),
    ("1F1B", "first without experts"),
    ("Interleaved1F1B", "in turn"),
    ("InterleavedZeroBubble", "in turn"),
    ("ZBVZeroBubble", "and back"),
    ("DualPipeV", "and back"),
)
def pipeline(name, blocks, wrap=""):
    """Ranks 0 and 1 hold stages, ranks 2 and 3 the others."""
    mesh = mesh_of(dp=2, ep=2, pp=2)
    schedule, everywhere = getattr(schedules, f"Schedule{name}"), PARTS[blocks]
    num_stages = sum(map(len, everywhere))
    parts = {
        number: Model(mesh.ep_group, kept) for number, kept in everywhere[mesh.pp_rank].items()
    }
    shape = torch.empty(ROWS, DIM, dtype=torch.float64, requires_grad=True)
    stages = []
    for number, part in parts.items():
        module = part
        if wrap:
            module = moe_ext.parallelize(part)
            module = DistributedDataParallel(module, process_group=mesh.stage_group)
        options = {"input_args": (shape,), "output_args": shape, "group": mesh.pp_group}
        stages.append(PipelineStage(module, number, num_stages, torch.device("cpu"), **options))
    is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
    run = schedule(stages[0] if is_single else stages, MICRO, loss_fn=F.mse_loss)
    model = nn.ModuleDict({"blocks": nn.ModuleDict()})
    for part in parts.values():
        model["blocks"].update(part.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms, losses = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = data(step, mesh.data_rank, mesh.data_size)
        first = (x,) if any(stage.is_first for stage in stages) else ()
        last = {"target": y, "losses": losses} if any(s.is_last for s in stages) else {}
        run.step(*first, **last)
        if not wrap:
            md.sync_gradients(model, mesh=mesh)
        norms.append(md.clip_grad_norm_(model, 0.05, mesh=mesh))
        optimizer.step()
        if any(block.moe is not None for block in model["blocks"].values()):
            moe_ext.nn.update_selection_bias(model, group=mesh.stage_group)
    if losses:
        mine = torch.arange(MICRO) + mesh.data_rank * MICRO + (STEPS - 1) * 2 * MICRO
        torch.testing.assert_close(torch.stack(losses), one_process(2, STAGES)[0][mine], **TIGHT)
    assert_equals_one_process(model, norms, 2, STAGES)


def train_shards(mesh, model, sequence=None, optimizers=None):
    """Ranks of a tensor-parallel group see the same rows, or with `sequence` shards of them."""
    optimizers, norms = optimizers or [torch.optim.SGD(model.parameters(), lr=0.1)], []
    moe_ext.nn.set_loss_scale(model, 1 / SUM)
    is_sharded = isinstance(model, FSDPModule)
    for step in range(STEPS):
        model.zero_grad()
        pairs = zip(
            *(t.chunk(SUM) for t in data(step, mesh.data_rank, mesh.data_size)), strict=True
        )
        for number, pair in enumerate(pairs):
            if is_sharded:
                model.set_requires_gradient_sync(number == SUM - 1)
            x, y = pair if sequence is None else (t.chunk(2)[mesh.tp_rank] for t in pair)
            (F.mse_loss(model(x), y) / SUM).backward()
        if not is_sharded:
            md.sync_gradients(model)
        norms.append(md.clip_grad_norm_(model, 0.05))
        for optimizer in optimizers:
            optimizer.step()
        moe_ext.nn.update_selection_bias(model, group=dist.group.WORLD)
    assert_equals_one_process(model, norms, mesh.data_size, SHARDS, sequence)


@CHECKS()
def zero_1():
    """Optimizer states of the dense part are sharded by torch, experts have an optimizer."""
    mesh = mesh_of(dp=2, ep=2)
    model = Model(mesh.ep_group)
    dense, experts = (group["params"] for group in md.expert_param_groups(model))
    sharded = ZeroRedundancyOptimizer(dense, torch.optim.SGD, lr=0.1)
    train_shards(mesh, model, optimizers=[sharded, torch.optim.SGD(experts, lr=0.1)])


@CHECKS()
def zero_2_and_3():
    """FSDP2 that keeps weights between forward and backward pass, or gathers them again.

    The second time it keeps shards and states on the CPU, where all of this test is.
    """
    mesh = mesh_of(dp=2, ep=2)
    for reshard in (False, True):
        model, options = Model(mesh.ep_group), {"reshard_after_forward": reshard}
        if reshard:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for name, block in model.blocks.items():
            # Its name is not in those of the parameters inside.
            model.blocks[name] = checkpoint_wrapper(block) if reshard else block
            md.fully_shard(model.blocks[name], mesh, **options)
        md.fully_shard(model, mesh, **options)
        train_shards(mesh, model)


@CHECKS()
def zero_3_and_tensor_parallel_dense_layers():
    """Shards of layers are sharded once more over the ranks that hold the same ones."""

    def weight_of(model):
        return model.blocks["1"].mlp.up.weight

    mesh = mesh_of(dp=2, tp=2, ep=4)
    model = Model(mesh.ep_group)
    for block in model.blocks.values():
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block.mlp, mesh.data_mesh["tp"], plan)
        md.fully_shard(block, mesh)
    md.fully_shard(model, mesh)
    assert weight_of(model).to_local().shape == (3, DIM)
    train_shards(mesh, model)
    # And its checkpoint, into layers that nothing divides.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()  # by the last gradients
    other = Model(mesh_of(dp=2, ep=2).ep_group)
    moments = torch.optim.SGD(other.parameters(), momentum=0.9)
    with shared_folder() as folder:
        md.checkpoint.save(folder, model, optimizer)
        md.checkpoint.load(folder, other, moments)
    found = md.full_state_dict(other)
    for name, tensor in md.full_state_dict(model).items():
        # Copies on ranks of a tp group differ by the order of their sums.
        torch.testing.assert_close(found[name], tensor, **TIGHT, msg=name)
    saved = optimizer.state[weight_of(model)]["momentum_buffer"].full_tensor()
    assert torch.equal(moments.state[weight_of(other)]["momentum_buffer"], saved)


@CHECKS()
def checkpointing():
    """All of a block, or its dense part and its experts: these send nothing a second time."""
    mesh, calls = mesh_of(dp=2, ep=2), {}
    for memory in ("none", "all", "selected"):
        model = Model(mesh.ep_group)
        for name, block in model.blocks.items():
            if memory == "all":
                model.blocks[name] = checkpoint_wrapper(block)
            elif memory == "selected":
                block.mlp = checkpoint_wrapper(block.mlp)
                if block.moe is not None:
                    block.moe.experts = checkpoint_wrapper(block.moe.experts)
        ran = []
        for layer in moe_layers(model).values():
            layer.router.register_forward_hook(lambda *_, ran=ran: ran.append(1))
        with md.count_traffic() as traffic:
            train_shards(mesh, model)
        calls[memory] = traffic.calls["all_to_all"], len(ran)
    sent, routed = calls["none"]
    assert sent >= 4 * SUM * STEPS
    assert routed == SUM * STEPS
    # Weights travel with rows to experts that are not wrapped.
    assert calls["selected"][0] <= sent
    assert calls["selected"][1] == routed
    assert calls["all"][0] >= sent + 2 * SUM * STEPS
    assert calls["all"][1] == 2 * routed


@CHECKS()
def bfloat16():
    """Weights, tokens and rows in bfloat16: losses and gradients of one process in bfloat16."""
    mesh = mesh_of(dp=2, ep=2)
    model, whole = Model(mesh.ep_group).bfloat16(), Model().bfloat16()
    moe_ext.nn.set_loss_scale(whole, 0.25)
    for rank in range(4):
        x, y = (t.bfloat16() for t in data(0, rank, 4))
        loss = F.mse_loss(whole(x), y)
        (loss / 4).backward()
        if rank == dist.get_rank():
            own = F.mse_loss(model(x), y)
            # Slots are summed in their order, in float32, wherever the experts are.
            assert torch.equal(own, loss)
    own.backward()
    md.sync_gradients(model)
    named = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = named[name].grad
        # A handful of roundings of 2^-9 each, of sums over ranks in another order.
        difference = float((full(parameter.grad) - wanted).float().norm())
        assert difference < 2**-6 * float(wanted.float().norm()) + 1e-6, name


@CHECKS()
def float16():
    """Scaled gradients of float16; where those of one rank overflow no rank takes the step."""
    mesh = mesh_of(dp=2, ep=2)
    model, whole = Model(mesh.ep_group).float(), Model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = md.GradScaler("cpu", init_scale=256.0)
    overflows = [False]
    if dist.get_rank() == 1:
        weight = model.blocks["1"].moe.experts.down_proj
        weight.register_hook(lambda grad: grad * torch.inf if overflows[0] else grad)
    moe_ext.nn.set_loss_scale(whole, 0.25)
    for rank in range(4):
        x, y = (t.float() for t in data(0, rank, 4))
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(whole(x).float(), y)
        (loss / 4).backward()
    x, y = (t.float() for t in data(0, dist.get_rank(), 4))
    named = dict(whole.named_parameters())
    for overflows[0] in (True, False):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        moe_ext.nn.set_loss_scale(model, scaler.get_scale())
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        md.sync_gradients(model)
        scaler.unscale_(optimizer)
        md.clip_grad_norm_(model, 1e9)
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, model.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) == overflows[0]
        assert scaler.get_scale() == 128.0
    for name, parameter in model.named_parameters():
        wanted = named[name].grad
        # A handful of roundings of 2^-11 each.
        difference = float((full(parameter.grad) - wanted).norm())
        assert difference < 2**-8 * float(wanted.norm()) + 1e-6, name


@CHECKS()
def dense_layers_by_tools_of_torch_and_experts_by_parallelize():
    """As torchtitan does: each dimension of the mesh by its own tool, and FSDP2 around them."""
    mesh = mesh_of(dp=2, tp=2, ep=2)
    across, others = mesh.data_mesh["tp"], mesh.data_mesh["data"]

    def spread():
        model = moe_ext.parallelize(Model(), mesh)
        for block in model.blocks.values():
            norm, plan = block.mlp.norm, {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block.mlp, across, plan)
            options = {"in_placements": (None,), "out_placements": (Replicate(),)}
            norm.forward = local_map(norm.forward, **options, device_mesh=across)
        return model

    train_shards(mesh, spread())
    model = spread()
    for block in model.blocks.values():
        md.fully_shard(block, mesh)
    train_shards(mesh, md.fully_shard(model, mesh))
    # FSDP2 of torch, without the ranks that share experts.
    model = spread()
    experts = {p for layer in moe_layers(model).values() for p in layer.experts.parameters()}
    assert all(p.placements == (Shard(0),) and p.device_mesh.size() == 2 for p in experts)
    fully_shard(model, mesh=others, ignored_params=experts)
    with pytest.raises(ValueError, match="fully_shard: expected the mesh of .* over which its"):
        model(torch.zeros(3, DIM, dtype=torch.float64))


@CHECKS()
def tensor_parallel_experts():
    """Each expert on two ranks, by shards; with tensor-parallel dense layers, and without."""
    for tp, ep in ((1, 1), (2, 2)):
        mesh = mesh_of(dp=4 // tp, tp=tp, ep=ep, etp=2)
        model = Model(mesh.ep_group)
        down = model.blocks["1"].moe.experts.down_proj
        assert local_part(down).shape == (EXPERTS // ep, DIM, 3)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks.values() if tp > 1 else ():
            parallelize_module(block.mlp, mesh.data_mesh["tp"], plan)
        train_shards(mesh, model)
        # What one process saves: each rank takes its shards.
        state = one_process(mesh.data_size, SHARDS)[2].state_dict()
        again = Model(mesh.ep_group)
        again.load_state_dict(state)
        found = md.full_state_dict(again)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def step(layer, optimizer):
    optimizer.zero_grad()
    layer(torch.randn(9, DIM)).square().sum().backward()
    if isinstance(optimizer, torch.optim.AdamW):
        md.sync_gradients(layer)
    optimizer.step()


def trained(mesh, steps, one_bit, seed=0):
    """A layer whose experts lie over the ranks of a mesh, and its optimizer after some steps."""
    torch.manual_seed(seed)
    layer = moe_ext.MoELayer(DIM, 8, EXPERTS, ep_group=mesh and mesh.ep_group)
    groups = moe_ext.optim.param_groups(layer, process_groups=one_bit)
    if one_bit:
        optimizer = moe_ext.optim.OneBitAdam(groups, freeze_step=1)
    else:
        # Not in a loop, whose every operation torch places on its own.
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        step(layer, optimizer)
    return layer, optimizer


def wholes(layer, optimizer):
    state = md.checkpoint.TrainingState(layer, optimizer).state_dict()
    # Two pieces are a dimension more.
    return {n: full(t).clone().flatten() for n, t in state.items() if ".touched_rows." not in n}


MESHES = {
    "whole": {"dp": 2, "ep": 2},
    "apart": {"dp": 1, "ep": 4},
    "halves": {"dp": 4, "ep": 2, "etp": 2},
    "halves of all": {"dp": 4, "ep": 1, "etp": 2},
    "quarters": {"dp": 4, "ep": 1, "etp": 4},
}
# Optimizer and mesh of what is saved, to the meshes that load it: into tensors that so many steps
# have made, or into none.
LOADED_ON = {
    ("AdamW", "halves"): {"halves": 1, "apart": 0, "one process": 0},
    ("AdamW", "apart"): {"halves": 0, "quarters": 1},
    # With what ranks owe for shards.
    ("OneBitAdam", "halves of all"): {"apart": 0, "whole": 2, "quarters": 0},
    ("OneBitAdam", "quarters"): {"whole": 0, "halves of all": 2},
}


@CHECKS(*LOADED_ON)
def checkpoints_of_tensor_parallel_experts(optimizer, saved_on):
    """Each expert on one rank or on several, another number of them when it is loaded."""
    one_bit = optimizer == "OneBitAdam"
    mesh, most = mesh_of(**MESHES[saved_on]), 1 + one_bit
    saved = trained(mesh, most, one_bit)
    want = wholes(*saved)
    owed = [n for n in want if ".owed." in n and ".experts." in n and want[n].any()]
    assert bool(owed) == (one_bit and mesh.edp_size > 1)
    with shared_folder() as folder:
        md.checkpoint.save(folder, *saved)
        for loaded_on, steps in LOADED_ON[optimizer, saved_on].items():
            other = mesh_of(**MESHES[loaded_on]) if loaded_on in MESHES else None
            for before in (0, most) if FULL and other is not None else (steps,):
                mine = trained(other, before, one_bit, seed=7)
                md.checkpoint.load(folder, *mine)
                found = wholes(*mine)
                assert found.keys() == want.keys()
                for name, tensor in want.items():
                    # What is owed is a mean of equal shares.
                    rtol = 1e-6 if ".owed." in name else 0
                    torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=0, msg=name)
                if one_bit:
                    step(*mine)


@CHECKS()
def options_of_tensor_parallel_experts():
    mesh = mesh_of(dp=4, ep=2, etp=2)
    x = torch.randn(20, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    capacity = moe_ext.nn.Capacity(0.6)
    for options in (
        {"dispatcher": moe_ext.nn.Dispatch("dedup", combine="reduced"), "activation": "gelu"},
        {"capacity": capacity},
        {"row_budget": moe_ext.nn.RowBudget(16)},
        {"experts": {"layout": "interleaved", "transposed": True}},
    ):
        layers = []
        for group in (mesh.ep_group, None):
            torch.manual_seed(0)
            mine = dict(options)
            if "experts" in mine:
                mine["experts"] = moe_ext.nn.GroupedExperts(
                    EXPERTS, DIM, 6, ep_group=group, **mine["experts"]
                )
            if group is None:
                mine = {n: v for n, v in mine.items() if n not in ("dispatcher", "combine")}
            layers.append(moe_ext.MoELayer(DIM, 6, EXPERTS, ep_group=group, **mine).double())
        outputs = [layer(x) for layer in layers]
        torch.testing.assert_close(*outputs, **TIGHT)
        torch.testing.assert_close(
            layers[0].metrics["num_dropped"], layers[1].metrics["num_dropped"]
        )
        for out in outputs:
            out.square().mean().backward()
        md.sync_gradients(layers[0])
        wanted = {name: p.grad for name, p in layers[1].named_parameters()}
        for name in md.placements(layers[0]):
            grad = layers[0].get_parameter(name).grad
            torch.testing.assert_close(full(grad), wanted[name], **TIGHT)
    options = {"ep_group": mesh.ep_group}
    refusals = {
        "expected bias and post_norm to be off": {"bias": True},
        "ffn_dim to be a multiple of etp=2": {"ffn_dim": 5},
        "expected dispatcher to be a name": {"dispatcher": md.LocalDispatcher(4)},
    }
    for text, wrong in refusals.items():
        with pytest.raises(ValueError, match=text):
            moe_ext.MoELayer(
                **{"model_dim": DIM, "ffn_dim": 6, "num_experts": 4, **options, **wrong}
            )
    with pytest.raises(ValueError, match="expected an ep_group of a MoEMesh with etp=1"):
        moe_ext.nn.ModuleExperts([nn.Linear(4, 4)] * 2, **options)
    layer = moe_ext.MoELayer(DIM, 6, 4, **options)
    with pytest.raises(ValueError, match="fully_shard: expected mesh to have etp=1"):
        md.fully_shard(layer, mesh)
    # Norms of LAMB run over all shards.
    torch.manual_seed(3)
    alone = moe_ext.MoELayer(DIM, 6, 4).double()
    layer = moe_ext.MoELayer(DIM, 6, 4, **options).double()
    layer.load_state_dict(alone.state_dict())
    for module in (layer, alone):
        x = torch.randn(9, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        module(x).square().mean().backward()
        if module is layer:
            md.sync_gradients(layer)
        moe_ext.optim.LAMB(module.parameters(), lr=0.1, float32_state=False).step()
    for p, q in zip(layer.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, **TIGHT)


@CHECKS()
def a_tensor_parallel_layer_that_one_rank_has_no_gradient_of():
    mesh = mesh_of(dp=2, tp=2)
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    plan = {"used": ColwiseParallel(), "other": ColwiseParallel()}
    parallelize_module(model, mesh.data_mesh["tp"], plan)
    x = torch.ones(1, 4)
    out = model["used"](x)
    if mesh.data_rank == 0:
        out = out + model["other"](x)
    out.sum().backward()
    md.sync_gradients(model)
    assert torch.equal(model["used"].weight.grad.full_tensor(), torch.ones(4, 4))
    assert torch.equal(model["other"].weight.grad.full_tensor(), torch.full((4, 4), 0.5))


@CHECKS()
def sequence_parallel_dense_layers():
    """Megatron's: norms, experts and their dispatch see shards of the sequence."""
    mesh = mesh_of(dp=2, tp=2, ep=4)
    train_shards(mesh, Model(mesh.ep_group, sequence=(mesh.tp_group,)), sequence=(None,))


test_over_four_ranks = CHECKS.test(4)
