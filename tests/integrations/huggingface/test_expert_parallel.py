import copy
import os

import pytest
import torch
import torch.distributed as dist
from hf_families import build as build_family
from hf_families import spread_by_transformers
from hf_models import (
    NUM_BLOCKS,
    assert_near,
    assert_near_each,
    assert_same_state,
    assert_trains_as,
    build,
    families,
    gradients_of,
    make_batch,
    mean_of_ranks,
    run,
    spread,
)
from rank_checks import Checks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import moe_ext
from moe_ext.distributed.dtensor import is_dtensor, local_part, num_shards
from moe_ext.integrations.huggingface import full_state_dict

RANKS = 2
CHECKS = Checks()


def make(family, **kwargs):
    """In evaluation mode: Phi-MoE's router draws at random in training."""
    return build(family, **kwargs).eval()


def batch_of(rank):
    """Ranks have batches of different lengths."""
    batch = make_batch()
    if rank == 0:
        return batch
    return {name: tensor[:1, :7] for name, tensor in batch.items()}


def one_process(family):
    return mean_of_ranks(make(family), [batch_of(rank) for rank in range(RANKS)])


@CHECKS()
def replaced():
    """`replace(ep_group=...)`: gradients, files, copies; test_families.py has every family."""
    rank = dist.get_rank()
    for family in ("mixtral", "deepseek_v3"):
        whole, logits = one_process(family)
        model = make(family)
        names = list(model.state_dict())
        spread(model)
        assert list(model.state_dict()) == names
        assert_trains_as(model, whole, batch_of(rank), logits[rank])
        want = gradients_of(whole)
        for name, parameter in model.named_parameters():
            assert is_dtensor(parameter) == (".experts." in name)
            assert local_part(parameter).shape[0] * num_shards(parameter) == want[name].shape[0]
        norm = moe_ext.distributed.clip_grad_norm_(model, 1e9)
        assert_near(norm, torch.nn.utils.get_total_norm(want.values()))
        again = copy.deepcopy(model)
        assert_near(again(**batch_of(rank)).logits, logits[rank])


@CHECKS(("replicas",), ("seeds",))
def a_loop_without_averages_is_refused(kind):
    """At the second training pass; other dense parameters at the first one."""
    rank, model = dist.get_rank(), make("mixtral")
    spread(model)
    if kind == "seeds":
        with torch.no_grad():
            model.lm_head.weight += rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(sync):
        model(**batch_of(rank)).loss.backward()
        if sync:
            moe_ext.distributed.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    text = "forward: expected the checksum of the dense parameters .*sync_gradients.* on rank 1"
    if kind == "replicas":
        for _ in range(3):
            step(sync=True)
        step(sync=False)
    with pytest.raises(ValueError, match=text):
        for _ in range(4):
            step(sync=kind == "replicas")


@CHECKS()
def refusals():
    rank = dist.get_rank()
    model = make("mixtral", num_local_experts=5)
    before = model.config._experts_implementation
    text = r"experts.num_experts to be a multiple of the group size 2, got 5 on rank 0"
    with pytest.raises(ValueError, match=text):
        moe_ext.replace(model, ep_group=dist.group.WORLD)
    assert model.config._experts_implementation == before
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] == 5
    model = make("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.forward = experts.forward
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.experts to have the forward of its"):
        moe_ext.replace(model, ep_group=dist.group.WORLD)
    del experts.forward
    model(**batch_of(rank)).loss.backward()
    with pytest.raises(ValueError, match=r"expected model.layers.0.mlp.experts.* no gradient"):
        moe_ext.replace(model, ep_group=dist.group.WORLD)
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] == 6
    model.zero_grad()
    hook = model.model.layers[1].mlp.experts.down_proj.register_hook(torch.Tensor.clone)
    with pytest.raises(ValueError, match=r"expected model.layers.1.mlp.experts.* no hooks"):
        moe_ext.replace(model, ep_group=dist.group.WORLD)
    hook.remove()
    # What one rank refuses, every rank refuses; what was held stays the model's own.
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    alone = [dist.new_group([member]) for member in range(RANKS)]
    for hold in (
        lambda: model(**batch_of(1)),
        lambda: torch.optim.SGD(model.parameters(), lr=1.0),
        lambda: list(model.parameters()),
        lambda: DistributedDataParallel(model, process_group=alone[1]),
    ):
        objects = list(map(id, model.parameters()))
        held = hold() if rank == 1 else None
        with pytest.raises(ValueError, match=r"that nothing else holds .* on rank 1"):
            moe_ext.replace(model, ep_group=dist.group.WORLD)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name])
        assert rank == 0 or list(map(id, model.parameters())) == objects
        assert type(model.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
        assert model.config._experts_implementation != "moe_ext"
        del held
    moe_ext.replace(model, ep_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"experts that an earlier call has spread over ranks"):
        moe_ext.replace(model, ep_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"verify before replace"):
        moe_ext.verify(model, batch_of(rank))


@CHECKS()
def other_dispatchers():
    """What comes back slot by slot has the same bits, sums of a rank and int8 their error."""
    rank = dist.get_rank()
    whole, logits = one_process("mixtral")
    os.environ["LOCAL_WORLD_SIZE"] = "1"

    def trained(**options):
        model = spread(make("mixtral"), **options)
        output = model(**batch_of(rank))
        output.loss.backward()
        return model, output.logits

    _, plain = trained()
    for dispatcher in ("dedup", "hierarchical", "allgather", "auto"):
        model, got = trained(dispatcher=dispatcher)
        assert torch.equal(got, plain), dispatcher
        assert type(model.model.layers[0].mlp.experts._dispatcher).__name__ != "AutoDispatcher"
    for options in ({"dispatcher": "dedup", "combine": "reduced"}, {"dispatcher": "allgather"}):
        assert_trains_as(spread(make("mixtral"), **options), whole, batch_of(rank), logits[rank])
    with moe_ext.distributed.count_traffic() as full:
        trained()
    with moe_ext.distributed.count_traffic() as coded:
        model, got = trained(wire="int8")
    assert coded.total_bytes < full.total_bytes
    # A step of int8 is 1/127 of the largest element of a row, here two rounded rows deep.
    assert_near(got, plain, relative=0.02)
    assert not torch.equal(got, plain)


@CHECKS()
def options_are_refused_on_every_rank():
    rank, group = dist.get_rank(), dist.group.WORLD
    model = make("mixtral")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for options, text in (
        ({"dispatcher": "p2p"}, r"replace: expected dispatcher to be one of .*got 'p2p'"),
        (
            {"combine": "reduced"},
            r"to be one of \('auto', 'dedup', .* with combine='reduced', got 'alltoall'",
        ),
        ({"dispatcher": "local"}, r"with an ep_group of several ranks, got 'local'"),
        ({"wire": "int3"}, r"replace: expected wire to be one of"),
        (
            {"dispatcher": "dedup" if rank else "alltoall"},
            r"expected dispatcher to be equal on every rank",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            moe_ext.replace(model, ep_group=group, **options)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name])
    assert moe_ext.replace(model, ep_group=group) == NUM_BLOCKS
    with pytest.raises(ValueError, match=r"'alltoall' for experts with a norm behind them"):
        moe_ext.replace(build_family("muse_spark"), ep_group=group, dispatcher="dedup")


@CHECKS()
def an_index_past_the_last_expert():
    """Eager skips it, and so do one process and the ranks."""
    model = make("mixtral")
    experts, generator = model.model.layers[0].mlp.experts, torch.Generator().manual_seed(3)
    x = torch.randn(5, 32, generator=generator)
    index = torch.tensor([[0, 6], [6, 6], [5, 1], [6, 3], [2, 4]])
    weights = torch.rand(5, 2, generator=generator)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        want = experts(x, index, weights)
        assert not want[1].any()
        for group in (None, dist.group.WORLD):
            moe_ext.replace(model, ep_group=group)
            assert_near(experts(x, index, weights), want)


@CHECKS()
def a_model_without_memory():
    """Spread on the meta device, then loaded: no rank holds the whole model."""
    whole = make("mixtral")
    with torch.device("meta"):
        model = make("mixtral")
    moe_ext.replace(model, ep_group=dist.group.WORLD)
    model.to_empty(device="cpu").load_state_dict(whole.state_dict())
    for mine, buffer in zip(model.buffers(), whole.buffers(), strict=True):
        mine.copy_(buffer)  # some are in no state dict
    with torch.no_grad():
        batch = batch_of(dist.get_rank())
        assert_near(model(**batch).logits, whole(**batch).logits)


@CHECKS()
def different_models_are_refused():
    rank = dist.get_rank()
    model = make("mixtral", num_local_experts=4 + 2 * rank)
    with pytest.raises(ValueError, match=r"expected num_experts to be equal on every rank"):
        moe_ext.replace(model, ep_group=dist.group.WORLD)
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] == 4 + 2 * rank


@CHECKS()
def gradient_checkpointing():
    """A recomputed forward pass runs its collectives again, and on every rank."""
    rank = dist.get_rank()
    model = make("qwen3_moe").train()
    moe_ext.replace(model, ep_group=dist.group.WORLD)
    _, want = run(model, batch_of(rank))
    model.gradient_checkpointing_enable()
    _, grads = run(model, batch_of(rank))
    assert_near_each(grads, want)


@CHECKS()
def ranks_generate_texts_of_other_lengths():
    rank = dist.get_rank()
    options = {"do_sample": False, "max_new_tokens": 3 + 4 * rank}
    tokens = batch_of(rank)["input_ids"][:, :5]
    want = make("mixtral").generate(tokens, **options)
    model = spread(make("mixtral"))
    assert torch.equal(model.generate(tokens, synced_gpus=True, **options), want)


def parallel_model(family, experts_implementation, tp_size):
    model = make(family)
    model.set_experts_implementation(experts_implementation)
    ep_mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    tp_mesh = init_device_mesh("cpu", (RANKS // tp_size, tp_size), mesh_dim_names=("fsdp", "tp"))
    return spread_by_transformers(model, ep_mesh, tp_mesh["tp"])


IMPLEMENTATIONS = ("moe_ext", "grouped_mm", "eager")


@CHECKS(*[(name, size) for name in IMPLEMENTATIONS for size in (1, 2)])
def interface_of_transformers(experts_implementation, tp_size):
    rank = dist.get_rank()
    for family in ("mixtral", "gpt_oss"):
        whole = make(family)
        whole.set_experts_implementation("eager")
        # A tensor-parallel group shares one batch; else each rank has its own.
        shared = tp_size == RANKS
        wants = []
        for r in range(RANKS):
            output = whole(**batch_of(0 if shared else r))
            wants.append(output.logits.detach())
            if not shared or r == 0:
                output.loss.backward()
        model = parallel_model(family, experts_implementation, tp_size)
        output = model(**batch_of(0 if shared else rank))
        assert_near(output.logits, wants[rank])
        output.loss.backward()
        got = gradients_of(model)
        for name, gradient in gradients_of(whole).items():
            # Gradients of experts are sums over the group, as transformers' own implementation
            # leaves them; where a group shares one batch, its ranks' losses are one loss.
            if shared or ".experts." in name:
                assert_near(got[name], gradient)


@CHECKS(("moe_ext",), ("grouped_mm",))
def a_rank_without_tokens(experts_implementation):
    """It takes part in forward and backward."""
    rank = dist.get_rank()
    model = parallel_model("mixtral", experts_implementation, 1)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(0 if rank else 5, 32, requires_grad=True)
    index = torch.zeros(x.shape[0], 2, dtype=torch.int64)  # all to an expert of rank 0
    y = experts(x, index, torch.ones(x.shape[0], 2))
    y.sum().backward()
    assert y.shape == x.shape
    assert experts.gate_up_proj.grad is not None


@CHECKS()
def a_rank_without_images():
    """It skips the experts for images, and the text of its next layer must not go to them."""
    rank = dist.get_rank()
    whole, model = build_family("ernie4_5_vl_moe").eval(), build_family("ernie4_5_vl_moe").eval()
    moe_ext.replace(model, ep_group=dist.group.WORLD)
    ids = torch.arange(3, 12)[None]
    images = (torch.arange(9) % 3 == rank)[None]
    options = {"input_ids": ids, "use_cache": False}
    with torch.no_grad():
        want = whole(**options, moe_mm_token_type_ids=images).last_hidden_state
        for _ in range(2):
            got = model(**options, moe_mm_token_type_ids=images).last_hidden_state
            assert_near(got, want)
            text = (
                r"expected the layer that runs \(a batch without tokens of a kind.*give every rank "
                r"some\) to be equal .*layers.0.mlp.vision_moe.experts.* on rank 0.*"
                r"layers.1.mlp.text_moe.experts.* on rank 1"
            )
            with pytest.raises(ValueError, match=text):
                model(**options, moe_mm_token_type_ids=images & (rank == 0))


test_two_ranks = CHECKS.test(RANKS)


@families
def test_full_state_dict_of_one_rank(family):
    model = make(family)
    moe_ext.replace(model)
    assert_same_state(full_state_dict(model), model.state_dict())
