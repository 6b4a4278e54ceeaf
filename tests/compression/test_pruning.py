"""Pruned weights: what is kept, that it stays, and its messages, against dense training."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from fsdp_checks import assert_same, weights
from rank_checks import Checks, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations

import moe_ext
from moe_ext import compression
from moe_ext import distributed as md
from moe_ext.distributed.dtensor import local_part
from moe_ext.testing import spawn_ranks

D, F, E = 16, 24, 4
CHECKS = Checks()
PATTERNS = ("magnitude", "2:4", "experts", "neurons")
# One ranks the elements of an expert, the other one all experts.
SHARED = ("magnitude", "experts")


def layer(ep_group=None, **options):
    torch.manual_seed(0)
    return moe_ext.MoELayer(D, F, E, 2, ep_group=ep_group, **options)


def batch(rank, step=0):
    return torch.randn(12 + rank, D, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model, step=0, ranks=(0,)):
    model.zero_grad()
    for rank in ranks:
        model(batch(rank, step)).square().mean().div(len(ranks)).backward()


def marks_of(pruning):
    return {name: mask.marks for name, mask in pruning.masks.items()}


def assert_masked(model, pruning):
    for name, mask in pruning.masks.items():
        parameter = dict(model.named_parameters())[name]
        assert not local_part(parameter)[~mask.marks].any()
        if parameter.grad is not None:
            assert not local_part(parameter.grad)[~mask.marks].any()


def by_formula(weight, pattern, density):
    """Kept elements of one expert's matrix, one element at a time."""
    if pattern == "2:4":
        marks = torch.zeros_like(weight, dtype=torch.bool)
        for row, kept in zip(weight.view(-1, 4), marks.view(-1, 4), strict=True):
            order = sorted(range(4), key=lambda i: (-abs(row[i].item()), i))
            kept[order[:2]] = True
        return marks
    flat = weight.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda i: (-abs(flat[i]), i))
    marks = torch.zeros(len(flat), dtype=torch.bool)
    marks[order[: round(density * len(flat))]] = True
    return marks.view(weight.shape)


@pytest.mark.parametrize("pattern", ["magnitude", "2:4"])
def test_elements_are_those_of_the_formula(pattern):
    model = layer()
    with torch.no_grad():
        model.experts.down_proj[0, 0].fill_(0.01)  # ties
    before = copy.deepcopy(model.experts)
    density = 0.5 if pattern == "2:4" else 0.3
    pruning = compression.prune(model, pattern, density=density)
    for name, mask in pruning.masks.items():
        weight = before.get_parameter(name.removeprefix("experts."))
        for expert in range(E):
            want = by_formula(weight[expert], pattern, density)
            assert torch.equal(mask.marks[expert], want)
        kept = model.get_parameter(name)
        assert torch.equal(kept, torch.where(mask.marks, weight, 0.0))
    assert pruning.density == pytest.approx(density, abs=2e-3)


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "interleaved"}, {"transposed": True}, {"activation": "gelu", "gated": False}],
)
def test_neurons_go_as_a_whole(options):
    """Experts without the hidden units are those with them pruned."""
    torch.manual_seed(0)
    experts = moe_ext.nn.GroupedExperts(E, D, F, **options).double()
    pruning = compression.prune(experts, "neurons", density=0.25)
    marks = marks_of(pruning)
    down = marks["down_proj"] if not options.get("transposed") else marks["down_proj"].mT
    assert torch.equal(down.sum(dim=2), torch.full((E, D), F // 4))
    # Gradients of the results by what is left reach exactly the kept units.
    rows = torch.randn(8, D, dtype=torch.float64)
    offsets = torch.arange(0, 9, 2)
    want = experts(rows, offsets)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            other = torch.where(marks[name], parameter, 1e3)
            if name != "down_proj":
                # What enters a pruned unit does not matter: nothing leaves it.
                parameter.copy_(other)
    torch.testing.assert_close(experts(rows, offsets), want)


def test_experts_with_the_largest_norms_stay():
    model = layer()
    with torch.no_grad():
        for i, scale in enumerate((3, 1, 4, 2)):
            model.experts.gate_up_proj[i] *= scale
            model.experts.down_proj[i] *= scale
    pruning = compression.prune(model, "experts", density=0.5)
    for marks in marks_of(pruning).values():
        assert marks.flatten(1).all(dim=1).tolist() == [True, False, True, False]
        assert marks.flatten(1).any(dim=1).tolist() == [True, False, True, False]


def test_movement_keeps_what_moves_away_from_zero():
    model = layer()
    pruning = compression.prune(model, "movement")
    assert pruning.density == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scores = {name: torch.zeros_like(model.get_parameter(name)) for name in pruning.masks}
    for step in range(3):
        backward(model, step)
        for name, score in scores.items():
            parameter = model.get_parameter(name)
            score -= parameter.detach() * parameter.grad
        optimizer.step()
    pruning.update(0.2)
    first = marks_of(pruning)
    for name, score in scores.items():
        for expert in range(E):
            best = score[expert].flatten().argsort(descending=True, stable=True)
            want = torch.zeros(score[expert].numel(), dtype=torch.bool)
            want[best[: round(0.2 * len(want))]] = True
            assert torch.equal(first[name][expert].flatten(), want)
    pruning.update(0.1)
    assert pruning.density == pytest.approx(0.1, abs=2e-3)
    for name, marks in marks_of(pruning).items():
        assert not (marks & ~first[name]).any()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_training_is_that_of_dense_with_masked_weights(pattern):
    """Momentum and decay included; the oracle masks weights and gradients by hand."""
    model = layer()
    oracle = copy.deepcopy(model)
    pruning = compression.prune(model, pattern)
    marks = marks_of(pruning)
    with torch.no_grad():
        for name, mask in marks.items():
            oracle.get_parameter(name).mul_(mask)
    options = {"lr": 0.05, "weight_decay": 0.1}
    pair = [(m, torch.optim.AdamW(m.parameters(), **options)) for m in (model, oracle)]
    for step in range(3):
        for one, optimizer in pair:
            backward(one, step)
            if one is oracle:
                for name, mask in marks.items():
                    one.get_parameter(name).grad.mul_(mask)
            optimizer.step()
    assert_masked(model, pruning)
    for name, parameter in oracle.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_weights_that_momentum_moves_stay_zero():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    pruning = compression.prune(model)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        assert_masked(model, pruning)
    pruning.remove()
    assert not any("mask" in name for name in model.state_dict())
    backward(model, 3)
    optimizer.step()
    assert model.experts.down_proj.count_nonzero() > 0.9 * model.experts.down_proj.numel()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_stay_pruned(copied):
    model = layer()
    pruning = compression.prune(model, density=0.25)
    twin = copied(copied(model))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, weight_decay=0.1)
    backward(twin)
    assert_masked(twin, pruning)
    optimizer.step()
    assert_masked(twin, pruning)


def test_saved_models_stay_pruned(tmp_path):
    model = layer()
    pruning = compression.prune(model, density=0.25)
    marks = pruning.masks["experts.down_proj"].marks
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = moe_ext.MoELayer(D, F, E, 2)
    again = compression.prune(other, "magnitude")
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(again.masks["experts.down_proj"].marks, marks)
    assert again.density == pruning.density
    backward(other)
    assert_masked(other, again)


def test_models_are_pruned_in_inference_mode_and_trained_after_it():
    model = nn.Linear(D, 8)
    with torch.inference_mode():
        pruning = compression.prune(model, parameters=["weight"])
    pruning.update(0.25)
    assert pruning.density == 0.25 == model.weight.count_nonzero() / model.weight.numel()


@pytest.mark.parametrize("prefix", ["", "0.", "part."])
def test_each_parameter_has_the_codec_of_its_mask(prefix):
    """Also the eleventh layer, and one in a part, whose names end as those of others."""
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(12)))
    layers.append(nn.Sequential(nn.Linear(8, 8, bias=False)))
    names = [name for name, _ in layers.named_parameters()]
    codecs = compression.prune(layers, parameters=names).codecs()
    policy = compression.Policy("none", by_name=codecs, dense_below=0)
    for name, parameter in layers.named_parameters():
        assert policy.codec_for(prefix + name, "other", parameter).mask.parameter is parameter


@pytest.mark.parametrize("pattern", ["magnitude", "movement"])
def test_a_parameter_that_is_replaced_is_named_in_its_model_alone(pattern):
    """By a forward pass; steps of optimizers of other models go on."""
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    pruning = compression.prune(model, pattern, parameters=["weight"])
    parametrizations.weight_norm(model)
    other.weight.grad = torch.ones_like(other.weight)
    torch.optim.SGD(other.parameters(), 0.1).step()
    with pytest.raises(ValueError, match="expected weight to be a parameter of Parametrized"):
        model(torch.ones(1, 8))
    pruning.remove()
    model(torch.ones(1, 8))


def test_a_pruning_that_was_removed_says_so():
    model = nn.Linear(8, 8)
    pruning = compression.prune(model, parameters=["weight"])
    pruning.remove()
    pruning.remove()
    for call in (lambda: pruning.update(0.25), lambda: pruning.density):
        with pytest.raises(ValueError, match="expected weight to be pruned, got a mask that was"):
            call()
    again = compression.prune(model, parameters=["weight"])
    pruning.remove()
    assert again.density == 0.5


def test_named_matrices():
    model = nn.Sequential(nn.Linear(D, 8), nn.Linear(8, 8))
    pruning = compression.prune(model, "2:4", parameters=["1.weight"])
    assert list(pruning.masks) == ["1.weight"]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="matrices pruned 2:4 on CUDA"):
            pruning.to_semi_structured()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "random"}, "pattern to be one of"),
        ({"density": 0.0}, r"density to be in \(0, 1\], got 0.0"),
        ({"pattern": "2:4", "density": 0.25}, "density to be 0.5 for 2:4"),
        ({"parameters": ["nothing"]}, "names of the model's, got .'nothing'"),
        ({"parameters": ["experts.down_proj_bias"]}, "multiple of 8 elements"),
        ({"pattern": "neurons", "parameters": ["router.weight"]}, "to be of GroupedExperts"),
    ],
)
def test_refuses(options, message):
    torch.manual_seed(0)
    model = moe_ext.MoELayer(D, F, E, 2, experts=moe_ext.nn.GroupedExperts(E, D, F, bias=True))
    if "experts.down_proj_bias" in options.get("parameters", ()):
        model.experts.down_proj_bias = nn.Parameter(torch.zeros(E, 7))
    with pytest.raises(ValueError, match=message):
        compression.prune(model, **options)
    assert not any("mask" in name for name, _ in model.named_buffers())
    compression.prune(model)
    with pytest.raises(ValueError, match="not to be pruned already"):
        compression.prune(model)


# -- messages ----------------------------------------------------------------------------------


def test_two_of_four_is_exact():
    torch.manual_seed(0)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        codec = compression.TwoOfFour(name)
        for numel in (0, 4, 8, 20, 4096):
            x = torch.randn(numel).to(dtype)
            x.view(-1, 4)[:, torch.randperm(4)[:2]] = 0
            x[: numel // 3] = -0.0
            payload = codec.encode(x)
            assert payload.numel() == codec.payload_bytes(numel)
            out = torch.ones(numel)
            codec.decode_add_(out, payload)
            assert torch.equal(out, x.float() + 1)
    assert compression.TwoOfFour().payload_bytes(4096) == 4096 * 2 * 9 // 16
    with pytest.raises(ValueError, match="two of four neighbours"):
        compression.TwoOfFour("fp32").encode(torch.ones(8))
    with pytest.raises(ValueError, match="expected x to be torch.bfloat16"):
        compression.TwoOfFour().encode(torch.zeros(8))


def sharded(pattern=None, dim=0, first=True, **options):
    """A layer under FSDP2, pruned before or after it is wrapped."""
    from torch.distributed.tensor import Shard

    model = layer(**options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pruning = compression.prune(model, pattern) if pattern and first else None
    place = {"shard_placement_fn": lambda p: Shard(dim if p.dim() > 2 else 0)}
    fully_shard(model.experts, mesh=mesh, **place)
    fully_shard(model, mesh=mesh)
    if pattern and not first:
        pruning = compression.prune(model, pattern)
    return model, pruning


def train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(steps):
        model.zero_grad()
        model(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()


def packed_numel(pruning, dim):
    """Elements that a rank sends, by a count of the masks' parts."""
    ranks = dist.get_world_size()
    return max(
        sum(int(m.marks.chunk(ranks, dim)[rank].sum()) for m in pruning.masks.values())
        for rank in range(ranks)
    )


@CHECKS(*((pattern, i % 2) for i, pattern in enumerate(PATTERNS)))
def fsdp_messages_change_no_bit(pattern, dim):
    plain, _ = sharded(pattern, dim)
    packed, pruning = sharded(pattern, dim, first=dim == 1)
    assert compression.pack_fsdp_messages(packed) == ["experts"]
    train(plain)
    with md.count_traffic() as traffic:
        train(packed)
    longest = packed_numel(pruning, dim)
    # Gathered before the forward and the backward pass; whoever owns no kept expert sends padding.
    sent = traffic.sent_bytes
    assert sent["all_gather"] == 3 * 2 * 4 * longest
    assert sent["reduce_scatter"] == 3 * 4 * longest
    assert_same(weights(packed), weights(plain))
    for name, mask in pruning.masks.items():
        parameter = packed.get_parameter(name)
        assert not parameter.full_tensor()[~mask.marks].any()
        assert not parameter.grad.full_tensor()[~mask.marks].any()


@CHECKS()
def two_of_four_without_a_known_mask():
    plain, _ = sharded("2:4")
    packed, _ = sharded("2:4")
    codec = compression.TwoOfFour("fp32")
    gather = compression.CompressedAllGather(codec, module=packed.experts, min_numel=0)
    packed.experts.set_custom_all_gather(gather)
    train(plain)
    with md.count_traffic() as traffic:
        train(packed)
    numel = 3 * E * F * D // 2  # of a rank's shard
    found = traffic.sent_bytes["all_gather"]
    # Beside the codes a number says that they are finite.
    assert found == 3 * 2 * (numel * 4 * 17 // 32 + 4)
    assert_same(weights(packed), weights(plain))


@CHECKS()
def the_ddp_hook_changes_no_bit():
    ends = []
    for packed in (False, True):
        model = layer()
        pruning = compression.prune(model, "magnitude", density=0.25)
        ddp = nn.parallel.DistributedDataParallel(model)
        if packed:
            policy = compression.Policy("none", by_name=pruning.codecs())
            state = compression.CompressionState(model=ddp, codec=policy)
            ddp.register_comm_hook(state, compression.compress_hook)
        with md.count_traffic() as traffic:
            train(ddp)
        ends.append(({n: p.detach() for n, p in model.named_parameters()}, traffic))
        assert_masked(model, pruning)
    assert_same(ends[1][0], ends[0][0])
    sent = ends[1][1].total_bytes
    kept = sum(mask.count for mask in pruning.masks.values())
    dense = model.router.weight.numel()
    assert 3 * 4 * (kept + dense) <= sent < 3 * 4 * (kept + dense) + 1000, sent


@CHECKS()
def replicas_with_other_masks_are_refused():
    torch.manual_seed(dist.get_rank())
    model = moe_ext.MoELayer(D, F, E, 2)
    with pytest.raises(ValueError, match="the mask of experts"):
        compression.prune(model)
    assert not any("mask" in name for name, _ in model.named_buffers())
    assert model.experts.down_proj.all()


test_over_two_ranks = CHECKS.test(2)


# -- over ranks that share the experts ------------------------------------------------------------


def spread(dp, ep, pattern, density=0.5):
    mesh = md.MoEMesh(dp=dp, ep=ep)
    model = layer(mesh.ep_group)
    return model, compression.prune(model, pattern, density=density)


def steps_of(model, reduce, count=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(count):
        model.zero_grad()
        model(batch(dist.get_rank(), step)).square().mean().backward()
        reduce(model)
        optimizer.step()


def of_ranks(rank, folder):
    """For each pattern what a checkpoint holds of experts over ranks."""
    return [saved_of_ranks(folder / pattern, pattern) for pattern in SHARED]


def saved_of_ranks(folder, pattern):
    """Experts over two ranks and two replicas: the loop packed against dense, then a save."""
    ends = []
    for packed in (False, True):
        model, pruning = spread(2, 2, pattern)
        if packed:
            policy = compression.Policy("none", by_name=pruning.codecs())
            state = compression.CompressionState(model=model, codec=policy)
            steps_of(model, functools.partial(compression.compress_gradients, state=state))
        else:
            steps_of(model, md.sync_gradients)
        assert_masked(model, pruning)
        ends.append({n: full(p.detach()) for n, p in model.named_parameters()})
    for name, parameter in ends[0].items():
        # Of the router four ranks are added up, in another order.
        assert "experts" not in name or torch.equal(ends[1][name], parameter), name
        torch.testing.assert_close(ends[1][name], parameter, rtol=1e-5, atol=1e-7)
    md.checkpoint.save(str(folder), model)
    return md.full_state_dict(model)


def wrapped_of_ranks(rank):
    """Experts over two ranks, each sharded over two: FSDP2 packed against whole messages."""
    for chosen in (False, True):
        ends, mesh = [], md.MoEMesh(dp=2, ep=2)
        for packed in (False, True):
            model = layer(mesh.ep_group)
            pruning = compression.prune(model, density=0.25)
            md.fully_shard(model, mesh)
            if packed:
                compression.pack_fsdp_messages(model, chosen_experts=chosen)
            with md.count_traffic() as traffic:
                train(model)
            ends.append(weights(model))
        assert_same(ends[1], ends[0])
        kept = sum(mask.count for mask in pruning.masks.values()) // 2
        assert traffic.sent_bytes["reduce_scatter"] <= 3 * 4 * kept


def test_experts_over_ranks_under_fsdp():
    spawn_ranks(wrapped_of_ranks, 4)


def on_others(rank, folder, wanted):
    """Another number of ranks takes weights and masks, and goes on with both."""
    for (pattern, want), ep in itertools.product(zip(SHARED, wanted, strict=True), (1, 2)):
        model, pruning = spread(dist.get_world_size() // ep, ep, pattern, 0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-2)
        md.checkpoint.load(str(folder / pattern), model)
        found = md.full_state_dict(model)
        assert_same(found, want)
        steps_of(model, md.sync_gradients, 1)
        assert_masked(model, pruning)


def test_masks_in_checkpoints_of_other_ranks(tmp_path):
    saved, *_ = spawn_ranks(of_ranks, 4, tmp_path)
    for pattern, found in zip(SHARED, saved, strict=True):
        model = layer()
        compression.prune(model, pattern)
        # One process prunes the same: ranks share what is ranked over all experts.
        for name, mask in found.items():
            if name.endswith("_mask"):
                assert torch.equal(model.state_dict()[name], mask), name
    spawn_ranks(on_others, 2, tmp_path, saved)
