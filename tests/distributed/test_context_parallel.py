"""A model whose ranks share sequences and experts, against one process with all of both."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_checks import full
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import moe_ext
from moe_ext.attention import position_ids, shard_sequence, shift_labels, token_mean_loss
from moe_ext.attention.sharding import rotate
from moe_ext.distributed import MoEMesh
from moe_ext.nn import Balance, TransformerBlock
from moe_ext.testing import spawn_ranks

VOCABULARY, DIM, SEQ_LEN, EXPERTS = 23, 16, 29, 4
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


class Model(nn.Module):
    def __init__(self, mesh, balance, layout="zigzag"):
        super().__init__()
        torch.manual_seed(0)
        groups = {} if mesh is None else {"cp_group": mesh.cp_group}
        ep_group = None if mesh is None else mesh.ep_group
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                DIM,
                4,
                moe_ext.MoELayer(
                    DIM,
                    12,
                    EXPERTS,
                    balance=replace(Balance.of("Model", balance), coef=0.5, z_coef=0.1),
                    ep_group=ep_group,
                    dtype=torch.float64,
                ),
                num_kv_heads=2,
                layout=layout,
                dtype=torch.float64,
                **groups,
            )
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCABULARY)
        self.double()

    def forward(self, tokens, **where):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, **where)
        return self.head(x)


def make_tokens(data_size):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (data_size, SEQ_LEN), generator=generator)


def make_mask(data_size, padded):
    mask = torch.ones(data_size, SEQ_LEN, dtype=torch.bool)
    if padded:
        mask[0, 17:] = False
    return mask


def one_process(data_size, cu_seqlens, padded, apart, scope):
    """Model with the gradients of the mean loss, and that loss; `apart`: each batch alone."""
    balance = None if apart and scope == "global_batch" else Balance(scope)
    model = Model(None, balance, "contiguous")
    tokens = make_tokens(data_size)
    mask = make_mask(data_size, padded)
    labels = shift_labels(tokens, cu_seqlens=cu_seqlens).masked_fill(~mask, -100)
    where = {"cu_seqlens": cu_seqlens, "position_ids": position_ids(SEQ_LEN, group=None)}
    count = (labels != -100).sum()
    total = 0.0
    batches = [slice(i, i + 1) for i in range(data_size)] if apart else [slice(None)]
    for rows in batches:
        logits = model(tokens[rows], token_mask=mask[rows] if padded else None, **where)
        loss = F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten(), reduction="sum")
        # The injected losses do not see the factor: their mean over the batches is wanted.
        moe_ext.nn.set_loss_scale(model, 1.0)
        (loss / count * len(batches)).backward()
        total = total + loss.detach() / count
    for parameter in model.parameters():
        parameter.grad /= len(batches)
    return model, total


def check_equal(rank, sizes, layout, cu_seqlens, padded, apart, scope="global_batch"):
    mesh = MoEMesh(**sizes)
    group, world = mesh.cp_group, dist.get_world_size()
    assert mesh.data_size == world // mesh.cp_size
    balance = Balance(scope, group=mesh.cp_group if apart else dist.group.WORLD)
    model = Model(mesh, balance, layout)
    where = {"group": group, "layout": layout, "cu_seqlens": cu_seqlens}
    tokens = make_tokens(mesh.data_size)
    mask = make_mask(mesh.data_size, padded)
    labels = shift_labels(tokens, cu_seqlens=cu_seqlens).masked_fill(~mask, -100)
    rows = slice(mesh.data_rank, mesh.data_rank + 1)
    tokens, labels, mask = (shard_sequence(x[rows], dim=1, **where) for x in (tokens, labels, mask))
    logits = model(
        tokens,
        position_ids=position_ids(SEQ_LEN, restart=False, **where),
        cu_seqlens=cu_seqlens,
        token_mask=mask if padded else None,
    )
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    loss = token_mean_loss(loss, count, group=dist.group.WORLD, grad_scale=world)
    loss.backward()
    moe_ext.distributed.sync_gradients(model)
    whole, expected = one_process(mesh.data_size, cu_seqlens, padded, apart, scope)
    torch.testing.assert_close(loss.detach(), expected, **TIGHT)
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        wanted = other.grad
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(full(parameter.grad), wanted, msg=message, **TIGHT)
    norm = moe_ext.distributed.clip_grad_norm_(model, 1.0)
    grads = [p.grad for p in whole.parameters()]
    torch.testing.assert_close(norm, nn.utils.get_total_norm(grads), **TIGHT)


GRIDS = {
    "folded": {"dp": 2, "ep": 2, "cp": 2},
    "beside": {"ep": 2, "cp": 2},
    "experts over two sequences": {"ep": 4, "cp": 2},
    "one sequence over two sets of experts": {"dp": 2, "ep": 2, "cp": 4},
    "no experts apart": {"dp": 4, "cp": 2},
}


def check_all(rank):
    for sizes in GRIDS.values():
        check_equal(rank, sizes, "zigzag", None, False, False)
    packed = (0, 11, 11, 12, SEQ_LEN)
    for sizes in (GRIDS["folded"], GRIDS["beside"]):
        check_equal(rank, sizes, "per_document", packed, False, False)
        check_equal(rank, sizes, "striped", None, True, False)
        check_equal(rank, sizes, "zigzag", None, False, True)
        check_equal(rank, sizes, "per_document", packed, True, True, "sequence")
    check_positions_of_another_length_on_one_rank(rank)
    return True


def check_positions_of_another_length_on_one_rank(rank):
    block = TransformerBlock(16, 2, nn.Identity(), cp_group=dist.group.WORLD)
    x, ids = torch.randn(1, 6, 16), position_ids(24, group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"tensor a \(6\) must match the size of tensor b \(5\)"):
        block(x, position_ids=ids[: 5 if rank == 1 else 6])
    assert block(x, position_ids=ids).shape == x.shape


def test_four_ranks_equal_one_process():
    assert all(spawn_ranks(check_all, 4, timeout=300))


def test_block_sizes():
    with pytest.raises(ValueError, match="model_dim to be a multiple of twice num_heads 3"):
        TransformerBlock(16, 3, nn.Identity())
    with pytest.raises(ValueError, match="num_kv_heads to divide 4 heads, got 3"):
        TransformerBlock(16, 4, nn.Identity(), num_kv_heads=3)
    block = TransformerBlock(16, 2, nn.Identity())
    x = torch.randn(2, 5, 16)
    once = block(x, position_ids=torch.arange(5))
    assert torch.equal(once, block(x, position_ids=torch.arange(5).expand(2, -1)))
    # Rotations compose: what counts is the distance.
    torch.testing.assert_close(once, block(x, position_ids=torch.arange(5) + 7))


def test_rotations_far_into_a_sequence_are_exact():
    """At position 10^6 a float32 angle is off by a twentieth."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 3, 12, generator=generator, dtype=torch.float64)
    ids = torch.tensor([1_000_003, 777_777, 5])
    angle = ids[:, None].double() * 10000.0 ** -(torch.arange(6, dtype=torch.float64) / 6)
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    expected = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    torch.testing.assert_close(rotate(x, ids, 10000.0), expected, rtol=1e-9, atol=1e-9)
    found = rotate(x.float(), ids[None], 10000.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_masked_tokens_reach_no_expert_of_any_network_that_takes_a_mask():
    moe = moe_ext.nn.ResidualMoE(16, 8, 4)
    x, mask = torch.randn(1, 5, 16), torch.tensor([[True, True, True, False, False]])
    TransformerBlock(16, 2, moe)(x, position_ids=torch.arange(5), token_mask=mask)
    assert int(moe.moe.metrics["num_tokens_per_expert"].sum()) == 3
    wrapped = TransformerBlock(16, 2, checkpoint_wrapper(moe))
    wrapped(x, position_ids=torch.arange(5), token_mask=mask)
    assert int(moe.moe.metrics["num_tokens_per_expert"].sum()) == 3
    dense = TransformerBlock(16, 2, nn.Linear(16, 16))
    assert dense(x, position_ids=torch.arange(5), token_mask=mask).shape == x.shape
    hidden = TransformerBlock(16, 2, nn.Sequential(moe))
    assert hidden(x, position_ids=torch.arange(5)).shape == x.shape
    with pytest.raises(ValueError, match="ffn to take token_mask, .* got Sequential"):
        hidden(x, position_ids=torch.arange(5), token_mask=mask)
