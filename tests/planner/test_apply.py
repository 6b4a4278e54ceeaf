"""Models trained in the placement of a plan against one process."""

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from torch.distributed.tensor import DTensor

from moe_ext.planner import ClusterSpec, Level, plan

CHECKS = Checks()
CLUSTER = ClusterSpec((Level("node", 4, 1e-6, 1e10),), {"float32": 1e11}, 4e8, 1e10)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
SGD = {"lr": 0.1, "momentum": 0.9}
# Sums of a few hundred products in float64, over three steps.
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
STEPS = 3


def made_model(**options):
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(**{**SIZES, **options}, output_router_logits=False)
    return transformers.MixtralForCausalLM(config).double()


def applied_to(model, **fixed):
    """The plan with these values for four ranks, and eight sequences of 16 tokens a step."""
    whole = {"pp": 1, "tp": 1, "cp": 1, "recompute": 0, "micro_batch": 2, **fixed}
    made = plan(
        model, CLUSTER, num_ranks=4, seq_len=16, global_batch=8, dtype="float32", fixed=whole
    )
    assert {name: made.choice[name] for name in whole} == whole
    return made.apply(model)


def batches():
    """Four micro-batches, of all ranks together."""
    return [
        torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(4)
    ]


def train(model, own, finish, optimizers):
    """Mean losses of three steps over the rank's micro-batches."""
    losses = []
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total = 0.0
        for batch in own:
            loss = model(input_ids=batch, labels=batch).loss
            (loss / len(own)).backward()
            total += float(loss) / len(own)
        finish()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total)
    return losses


def losses_of_one_process(**options):
    model = made_model(**options)
    model.set_experts_implementation("eager")  # torch's grouped products know no float64
    return train(model, batches(), lambda: None, [torch.optim.SGD(model.parameters(), **SGD)])


def assert_mean_losses(found, want):
    found = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(found)
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(found / dist.get_world_size(), want, **TIGHT)


@CHECKS(
    *((4, 0, "dedup"), (2, 1, "alltoall"), (2, 2, "alltoall"), (2, 3, "alltoall")),
)
def trains_as_one_process(ep, zero, dispatcher):
    pytest.importorskip("transformers")
    model, want = made_model(), losses_of_one_process()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    applied = applied_to(model, ep=ep, zero=zero, dispatcher=dispatcher, recompute=1)
    optimizers = applied.optimizers(torch.optim.SGD, **SGD)
    mine = batches()[dist.get_rank()]
    found = train(model, [mine], applied.sync_gradients, optimizers)
    assert_mean_losses(found, want)
    if zero >= 2:
        # After a forward pass the weights of a layer are whole, or shards again.
        attention = model.model.layers[0].self_attn
        assert isinstance(attention.q_proj.weight, DTensor)
        out = model(input_ids=mine).logits
        assert isinstance(attention.q_proj.weight, DTensor) == (zero == 3)
        out.sum().backward()
    if zero == 1:
        held = torch.tensor(_state_numel(optimizers))
        dist.all_reduce(held)
        # Dense parameters' state is on one rank, experts' on both that hold them.
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        assert int(held) == sum(sizes.values()) + experts


def _state_numel(optimizers):
    return sum(
        state["momentum_buffer"].numel()
        for optimizer in optimizers
        for state in getattr(optimizer, "optim", optimizer).state.values()
    )


@CHECKS()
def refuses_before_it_changes_anything():
    pytest.importorskip("transformers")
    for fixed, text in (({"tp": 2}, "expected tp to be 1, got 2"),):
        model = made_model()
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=text):
            applied_to(model, **fixed)
        assert kinds == [type(module) for module in model.modules()]


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name):
    pytest.importorskip("transformers")
    CHECKS.assert_passed(4, name)
