from dataclasses import replace

import torch
import torch.distributed as dist
from pairwise import pairs
from rank_checks import Checks, full, of_ranks, raised
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import distributed as md
from moe_ext.attention import document_ids, make_layout, sequence_parallel, shard_sequence
from moe_ext.nn import Balance, TopKRouter, count_tokens, reset_token_counts, set_loss_scale

# Sums of a few hundred products of numbers near one, in another order.
TIGHT = {"rtol": 1e-11, "atol": 1e-13}
E, K, STEPS = 4, 2, 3


def world():
    return dist.group.WORLD


def make_model(balance, ep_group=None):
    torch.manual_seed(1)
    balance = replace(balance, coef=0.5, z_coef=0.25)
    layers = [moe_ext.MoELayer(8, 6, E, K, balance=balance, ep_group=ep_group) for _ in range(2)]
    return nn.Sequential(*layers).double()


def batches():
    """Uneven, `[rank][micro-batch]`; one rank has an empty one."""
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randn((3 * rank + 5 * step) % 7, 8, dtype=torch.float64, generator=generator)
         for step in range(STEPS)]
        for rank in range(dist.get_world_size())
    ]  # fmt: skip


def of_one_batch():
    """The model after a backward pass of the mean over all tokens, in one process."""
    model = make_model(Balance())
    x = torch.cat([x for xs in batches() for x in xs])
    (model(x).square().sum() / x.shape[0]).backward()
    return model


def train(model, run):
    """One step on this rank's micro-batches: its part of the mean over all tokens."""
    num_tokens = sum(x.shape[0] for xs in batches() for x in xs)
    set_loss_scale(model, 1 / STEPS)
    for x in batches()[dist.get_rank()]:
        # Of the mean over ranks.
        (run(model, x).square().sum() * dist.get_world_size() / num_tokens).backward()
    md.sync_gradients(model)


def assert_same_gradients(model, want):
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        found = full(p.grad)
        torch.testing.assert_close(found, q.grad, msg=lambda m, n=name: f"{n}: {m}", **TIGHT)


def plain(model, x):
    return model(x)


def reentrant(model, x):
    return checkpoint(model, x.requires_grad_(), use_reentrant=True)


def not_reentrant(model, x):
    return checkpoint(model, x.requires_grad_(), use_reentrant=False)


def check_counted_steps_equal_one_batch():
    want = of_one_batch()
    for ep_group in (None, world()):
        for run in (plain, reentrant, not_reentrant):
            model = make_model(Balance("global_batch", world()), ep_group)
            with count_tokens(model):
                for x in batches()[dist.get_rank()]:
                    model(x)
            train(model, run)
            assert_same_gradients(model, want)


def check_running_counts_are_those_of_all_ranks():
    for run in (plain, reentrant, not_reentrant):
        model = make_model(Balance("global_batch", world()))[:1]
        for x in batches()[dist.get_rank()]:
            run(model, x).sum().backward()
        num_tokens = sum(x.shape[0] for xs in batches() for x in xs)
        counts = model[0].global_counts.total
        assert int(counts[:-1].sum()) == num_tokens * K, "every token once"
        assert int(counts[-1]) == STEPS * dist.get_world_size()
        assert all(torch.equal(other, counts) for other in of_ranks(counts))
        reset_token_counts(model)
        assert not counts.any()


def check_one_micro_batch_of_even_ranks_equals_one_batch_without_counting():
    generator = torch.Generator().manual_seed(4)
    shape = (dist.get_world_size(), 5, 8)
    xs = torch.randn(shape, dtype=torch.float64, generator=generator)
    whole = make_model(Balance())
    whole(xs.flatten(0, 1)).square().mean().backward()
    model = make_model(Balance("global_batch", world()))
    model(xs[dist.get_rank()]).square().mean().backward()
    md.sync_gradients(model)
    assert_same_gradients(model, whole)


def check_different_numbers_of_passes_are_refused_on_every_rank():
    model = make_model(Balance("global_batch", world()))

    def count(passes):
        with count_tokens(model):
            for _ in range(passes):
                model(batches()[0][1])

    for first, others in ((1, 2), (0, 2)):
        raised(
            ValueError,
            r"count_tokens: expected the passes of layer 0 to be equal.*2 on rank 1",
            *(count, others if dist.get_rank() else first),
        )
    assert model[0].global_counts.state == "running"


def biased_model(bias_update="sign", ep_group=None):
    torch.manual_seed(1)
    router = TopKRouter(8, E, K, score_fn="sigmoid", selection_bias=True, bias_update=bias_update)
    layer = moe_ext.MoELayer(8, 6, E, K, router=router, ep_group=ep_group)
    return nn.Sequential(layer).double()


def check_bias_updates_see_the_tokens_of_all_ranks(bias_update="sign", ep_group=None):
    model, whole = biased_model(bias_update, ep_group), biased_model(bias_update)
    changed = False
    for step in range(4):
        for xs in batches():
            whole(xs[step % STEPS]).sum().backward()
        model(batches()[dist.get_rank()][step % STEPS]).sum().backward()
        assert moe_ext.nn.update_selection_bias(model, rate=0.25, group=world()) == 1
        moe_ext.nn.update_selection_bias(whole, rate=0.25)
        assert torch.equal(model[0].router.selection_bias, whole[0].router.selection_bias)
        changed = changed or bool(model[0].router.selection_bias.any())
    assert changed


def check_quantile_updates_see_the_tokens_of_all_ranks():
    check_bias_updates_see_the_tokens_of_all_ranks("quantile", world())


def check_bias_updates_of_one_of_the_ranks_that_share_experts_are_refused():
    """Each rank would route by another bias."""
    model = biased_model("sign", world())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = "expected group to be all ranks that see data, .*, got None"
    raised(ValueError, told, moe_ext.nn.update_selection_bias, model)
    raised(ValueError, told, moe_ext.nn.register_bias_update, optimizer, model)


def check_bias_updates_beside_ddp(bias_update="sign"):
    model, whole = biased_model(bias_update), biased_model(bias_update)
    wrapped = md.data_parallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    moe_ext.nn.register_bias_update(optimizer, wrapped, rate=0.25, group=world())
    for step in range(3):
        for xs in batches():
            whole(xs[1]).sum().backward()
        for _ in range(2):
            wrapped(batches()[dist.get_rank()][1]).sum().backward()
        optimizer.step()
        moe_ext.nn.update_selection_bias(whole, rate=0.25)
        assert torch.equal(model[0].router.selection_bias, whole[0].router.selection_bias), step


def check_quantile_updates_beside_ddp():
    check_bias_updates_beside_ddp("quantile")


def sequences(seq_len, masked):
    """A batch of two sequences `[B, S, D]`, its documents `[B, S]` and its mask."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, seq_len, 8, dtype=torch.float64, generator=generator)
    ids = torch.randint(3, (2, seq_len), generator=generator).sort(1).values
    mask = torch.ones(2, seq_len, dtype=torch.bool)
    if masked:
        mask[1, seq_len // 2 :] = False
    return x, ids, mask


def by_documents(told, layout, group):
    """(documents of the whole sequences, arguments of a layer on its shard)."""
    if told == "nothing":
        return None, {}
    ids = sequences(SEQ_LEN, False)[1]
    if told == "ids":
        return ids, {"document_ids": shard_sequence(ids, dim=1, group=group, layout=layout)}
    ids = torch.bucketize(torch.arange(SEQ_LEN), torch.tensor(OFFSETS), right=True) - 1
    local = document_ids(OFFSETS, group=group, layout=layout)
    return ids, {"document_ids": local} if told == "offsets" else {}


SEQ_LEN, OFFSETS = 13, (0, 5, 5, 6, 13)
LAYOUTS = ("contiguous", "zigzag", "striped", "cost_balanced")
TOLD = ("nothing", "ids", "offsets", "context")


def check_sequences_over_ranks_equal_one_process():
    """Each document over the ranks is one sequence; the mean over ranks is that of one process."""
    ranks = dist.get_world_size()
    runs = (plain, reentrant, not_reentrant)
    for layout, told, masked, apart, run in pairs(LAYOUTS, TOLD, (False, True), (0, 1), runs):
        ep_group = world() if apart else None
        if layout == "cost_balanced":
            layout = make_layout(layout, SEQ_LEN, ranks, cu_seqlens=OFFSETS)
        x, _, mask = sequences(SEQ_LEN, masked)
        ids, documents = by_documents(told, layout, world())
        whole = make_model(Balance("sequence"))
        for layer in whole:
            layer(x, token_mask=mask, document_ids=ids).square().sum().backward()
        in_context = told == "context"
        model = make_model(Balance("sequence", None if in_context else world()), ep_group)
        where = {"dim": 1, "group": world(), "layout": layout}
        x, mask = shard_sequence(x, **where), shard_sequence(mask, **where)
        for layer, one in zip(model, whole, strict=True):

            def forward(x, layer=layer, mask=mask, documents=documents):
                return layer(x, token_mask=mask, **documents)

            if in_context:
                around = sequence_parallel(world(), layout=layout, cu_seqlens=OFFSETS)
                forward = around(forward)
            (run(forward, x).square().sum() * ranks).backward()
            loss = layer.metrics["balance_loss"].clone()
            dist.all_reduce(loss)
            torch.testing.assert_close(loss / ranks, one.metrics["balance_loss"], **TIGHT)
        md.sync_gradients(model)
        assert_same_gradients(model, whole)


def check_padding_between_documents_does_not_count():
    """Documents that are padded one by one, as unpadded in one process: ms-swift #10181."""
    lengths = torch.tensor([[3], [5], [1], [6]])
    ids = torch.arange(4).repeat_interleave(8)[None]
    mask = (torch.arange(8) < lengths).reshape(1, 32)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(1, 32, 8, dtype=torch.float64, generator=generator)
    whole = make_model(Balance("sequence"))[:1]
    whole[0](x[mask][None], document_ids=ids[mask][None]).square().sum().backward()
    for layout in LAYOUTS:
        model = make_model(Balance("sequence", world()))[:1]
        layout = make_layout(layout, 32, dist.get_world_size(), cu_seqlens=[0, 8, 16, 24, 32])
        where = {"dim": 1, "group": world(), "layout": layout}
        here, x_here, ids_here = (shard_sequence(part, **where) for part in (mask, x, ids))
        out = model[0](x_here, token_mask=here, document_ids=ids_here)
        (out[here].square().sum() * dist.get_world_size()).backward()
        md.sync_gradients(model)
        assert_same_gradients(model, whole)


def check_a_rank_without_positions():
    """Fewer positions than ranks, and none at all."""
    for seq_len in (0, 1, 3):
        x, ids, _ = sequences(seq_len, False)
        whole = make_model(Balance("sequence"))[:1]
        whole(x).sum().backward()
        model = make_model(Balance("sequence", world()))[:1]
        where = {"dim": 1, "group": world(), "layout": "contiguous"}
        shard = shard_sequence(x, **where)
        (model[0](shard).sum() * dist.get_world_size()).backward()
        md.sync_gradients(model)
        assert_same_gradients(model, whole)
        model[0](shard, document_ids=shard_sequence(ids, **where)).sum().backward()


def check_wrong_documents_are_refused_on_every_rank():
    last = dist.get_rank() == dist.get_world_size() - 1
    layer = make_model(Balance("sequence", world()))[0]
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    raised(
        ValueError,
        "number of sequences to be equal",
        lambda: layer(x[: 1 + last], document_ids=None),
    )
    raised(
        ValueError,
        "document_ids to be at least 0, got -1",
        lambda: layer(x, document_ids=ids - int(last)),
    )
    raised(
        TypeError, "token_mask to be bool", lambda: layer(x, token_mask=ids if last else ids > 0)
    )
    raised(
        ValueError,
        r"expected document_ids .* in the place of cu_seqlens",
        lambda: layer(x, cu_seqlens=[0, 3]),
    )
    raised(
        ValueError,
        r"expected the MoELayer in ffn to have balance=Balance\('sequence', group",
        lambda: moe_ext.nn.TransformerBlock(
            8, 2, make_model(Balance("sequence"))[0], cp_group=world()
        ),
    )
    layer(x, document_ids=ids)


test_on_ranks = Checks.of(globals()).test(4)
