import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext.attention import sequence_parallel
from moe_ext.nn import (
    Balance,
    collect_losses,
    count_tokens,
    reset_token_counts,
    set_loss_scale,
)

# Sums of a few hundred products of numbers near one, each rounded to 1e-16, in another order.
TIGHT = {"rtol": 1e-11, "atol": 1e-13}
E, K = 5, 2
SIZES = (7, 3, 11, 1)


def make_model(scope="global_batch", mode="inject", coef=0.5, **options):
    torch.manual_seed(1)
    options["balance"] = Balance(scope, coef=coef, z_coef=0.25, mode=mode)
    layers = [moe_ext.MoELayer(8, 6, E, K, **options) for _ in range(2)]
    return nn.Sequential(*layers).double()


def micro_batches(sizes=SIZES):
    torch.manual_seed(2)
    return [torch.randn(size, 8, dtype=torch.float64) for size in sizes]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def of_one_batch(xs, **options):
    """Gradients of the mean loss over all tokens at once."""
    model = make_model("micro_batch", **options)
    x = torch.cat(xs)
    (model(x).square().sum() / x.shape[0]).backward()
    return gradients(model), model


def share(y, xs):
    """The part of a micro-batch in the mean over all tokens."""
    return y.square().sum() / sum(x.shape[0] for x in xs)


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


def run(model, x, how):
    if how == "plain":
        return model(x)
    return checkpoint(model, x.requires_grad_(), use_reentrant=how == "reentrant")


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_counted_micro_batches_equal_one_batch(how, in_flight):
    """Micro-batches of a pipeline too: counted in another order, each waits for others."""
    xs = micro_batches()
    want, _ = of_one_batch(xs)
    model = make_model()
    set_loss_scale(model, 1 / len(xs))
    with count_tokens(model):
        for x in reversed(xs):
            model(x)
    waiting = []
    for x in xs:
        waiting.append(share(run(model, x, how), xs))
        if len(waiting) == in_flight:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()
    assert_close(gradients(model), want)


def test_gradients_may_be_divided_by_tokens_afterwards():
    xs = micro_batches()
    want, _ = of_one_batch(xs)
    model, num_tokens = make_model(), sum(SIZES)
    with count_tokens(model):
        for x in xs:
            model(x)
    set_loss_scale(model, num_tokens / len(xs))
    for x in xs:
        model(x).square().sum().backward()
    assert_close([grad / num_tokens for grad in gradients(model)], want)


def test_micro_batch_losses_differ_from_those_of_one_batch():
    # What makes the tests above tell anything.
    xs = micro_batches()
    want, _ = of_one_batch(xs)
    model = make_model("micro_batch")
    set_loss_scale(model, 1 / len(xs))
    for x in xs:
        share(model(x), xs).backward()
    difference = max((a - b).abs().max() for a, b in zip(gradients(model), want, strict=True))
    assert difference > 1e-3


@pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global_batch"])
def test_every_scope_on_every_device(device, scope):
    x = micro_batches()[0]
    found = []
    for name in ("micro_batch", scope):
        model = make_model(name)
        model(x).square().mean().backward()
        moe_ext.nn.reset_token_counts(model)
        found.append(gradients(model))
    assert_close(*found)


def test_padding_counts_nowhere():
    xs = micro_batches()
    want, _ = of_one_batch(xs)
    model = make_model()
    set_loss_scale(model, 1 / len(xs))
    padded = [torch.cat([x, torch.full((4, 8), 3.0, dtype=x.dtype)]) for x in xs]
    masks = [torch.arange(x.shape[0]) < x.shape[0] - 4 for x in padded]

    def forward(x, mask):
        for layer in model:
            x = layer(x, token_mask=mask)
        return x

    with count_tokens(model):
        for x, mask in zip(padded, masks, strict=True):
            forward(x, mask)
    for x, mask in zip(padded, masks, strict=True):
        share(forward(x, mask)[mask], xs).backward()
    assert_close(gradients(model), want)


def test_values_average_to_those_of_one_batch():
    xs = micro_batches()
    _, whole = of_one_batch(xs)
    model = make_model()
    with count_tokens(model):
        for x in xs:
            model(x)
    found = {"balance_loss": [[], []], "z_loss": [[], []]}
    for x in xs:
        model(x)
        for name, values in found.items():
            for layer, kept in zip(model, values, strict=True):
                kept.append(layer.metrics[name])
    for name, values in found.items():
        for layer, kept in zip(whole, values, strict=True):
            mean = torch.stack(kept).mean()
            torch.testing.assert_close(mean, layer.metrics[name], **TIGHT)


def running_reference(model, xs):
    """Gradients of the formula with the counts so far, of one layer."""
    layer = model[0]
    total, terms = torch.zeros(E, dtype=torch.float64), []
    for number, x in enumerate(xs, start=1):
        logits = x @ layer.router.weight.T
        probs = logits.softmax(1)
        total = total + torch.bincount(logits.topk(K).indices.flatten(), minlength=E)
        mean_tokens = total.sum() / K / number
        share_of = total / total.sum()
        terms.append(0.5 * E * (share_of * probs.sum(0) / mean_tokens).sum())
        terms.append(0.25 * logits.logsumexp(1).square().sum() / mean_tokens)
    return torch.autograd.grad(torch.stack(terms).sum() / len(xs), layer.router.weight)[0]


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_running_counts(how):
    xs = micro_batches()
    model = make_model()[:1]
    want = running_reference(model, xs)
    set_loss_scale(model, 1 / len(xs))
    for _ in range(2):
        model.zero_grad()
        for x in xs:
            (run(model, x, how) * 0).sum().backward()
        torch.testing.assert_close(model[0].router.weight.grad, want, **TIGHT)
        counts = model[0].global_counts.total
        assert counts[:-1].sum() == sum(SIZES) * K, "every token once"
        assert counts[-1] == len(xs)
        reset_token_counts(model)
    assert not model[0].global_counts.total.any()


def test_running_counts_of_a_pass_are_kept_for_its_backward():
    xs = micro_batches()
    model = make_model()[:1]
    want = running_reference(model, xs)
    set_loss_scale(model, 1 / len(xs))
    for y in [model(x) for x in xs]:
        (y * 0).sum().backward()
    torch.testing.assert_close(model[0].router.weight.grad, want, **TIGHT)


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_every_token_is_counted_once_in_a_counted_step(how):
    xs = micro_batches()
    model = make_model()
    for _ in range(2):
        with count_tokens(model):
            for x in xs:
                model(x)
        counts = [layer.global_counts.total.clone() for layer in model]
        for x in xs:
            run(model, x, how).sum().backward()
        for layer, before in zip(model, counts, strict=True):
            assert torch.equal(layer.global_counts.total, before)
            assert before[:-1].sum() == sum(SIZES) * K
            assert before[-1] == len(xs)


def test_dropout_draws_the_same_numbers_in_both_passes():
    xs = micro_batches()
    first, second = make_model()
    model = nn.Sequential(first, nn.Dropout(0.5), second)
    with count_tokens(model):
        for x in xs:
            model(x)
    counted = second.global_counts.total[:-1]
    seen = torch.zeros_like(counted)
    for x in xs:
        model(x)
        seen += second.metrics["num_tokens_per_expert"]
    assert torch.equal(seen, counted)


def test_evaluation_neither_counts_nor_needs_counts():
    xs = micro_batches()
    model = make_model().eval()
    plain = make_model("micro_batch").eval()
    for x in xs:
        model(x), plain(x)
        for name in ("balance_loss", "z_loss"):
            assert torch.equal(model[0].metrics[name], plain[0].metrics[name])
    assert not model[0].global_counts.total.any()


def test_counting_mistakes():
    xs = micro_batches()
    with (
        pytest.raises(ValueError, match=r"count_tokens: expected model to have a MoELayer .*none"),
        count_tokens(make_model("micro_batch")),
    ):
        pass
    model = make_model()
    with (
        pytest.raises(RuntimeError, match=r"expected a forward pass in training mode of layer '0'"),
        count_tokens(model),
    ):
        pass
    with count_tokens(model):
        model(xs[0])
    model(xs[0])
    with pytest.raises(RuntimeError, match=r"expected 1 training passes after count_tokens"):
        model(xs[0])
    with pytest.raises(KeyError), count_tokens(model):
        model(xs[0])
        raise KeyError
    assert not any(layer.global_counts.total.any() or layer.counting for layer in model)
    model(xs[0]).sum().backward()


def test_counts_survive_copies_and_moves():
    model = make_model()
    model(micro_batches()[0])
    twin = copy.deepcopy(model)
    assert twin[0].global_counts is not model[0].global_counts
    with torch.device("meta"):
        meta = make_model()
    assert meta[0].global_counts.total.is_meta
    meta.to_empty(device="cpu")
    assert not meta[0].global_counts.total.any()
    assert not meta[0].choices.any()
    assert "choices" not in model[0].state_dict()


DOCUMENTS = [[0, 4, 4, 5, 12], [0, 12, 12, 12, 12], [0, 1, 3, 9, 12]]


def loss_of_documents(layer, x, ids, mask, top_k=K):
    """The balance loss, one document after the other; the numbers of a sequence are its own."""
    terms = []
    for tokens_S, ids_S, mask_S in zip(x, ids, mask, strict=True):
        for number in ids_S.unique().tolist():
            tokens = tokens_S[(ids_S == number) & mask_S]
            if not len(tokens):
                continue
            logits = tokens @ layer.router.weight.T
            score_fn = layer.router.score_fn
            scores = logits.softmax(1) if score_fn == "softmax" else logits.sigmoid()
            scores = scores / scores.sum(1, keepdim=True)
            chosen = torch.bincount(logits.topk(top_k).indices.flatten(), minlength=E).double()
            terms.append(E * (chosen / (top_k * len(tokens)) * scores.mean(0)).sum())
    return torch.stack(terms).mean()


def assert_balance_loss(layer, want):
    """Its value, and its gradient alone at the router."""
    torch.testing.assert_close(layer.metrics["balance_loss"], want.detach(), **TIGHT)
    (want_grad,) = torch.autograd.grad(0.5 * want, layer.router.weight, retain_graph=True)
    torch.testing.assert_close(layer.router.weight.grad, want_grad, **TIGHT)


def told_by(how, offsets):
    """Ids of the documents of every token, and the arguments that tell a layer of them."""
    if how in ("shared ids", "shared offsets", "context"):
        offsets = [offsets[2]] * 3
    rows = [torch.tensor(row) for row in offsets]
    ids = torch.stack([torch.bucketize(torch.arange(12), row, right=True) - 1 for row in rows])
    if how == "scattered ids":
        ids = ids[:, torch.randperm(12)] * 3 + 1
    return ids, {
        "ids": {"document_ids": ids},
        "scattered ids": {"document_ids": ids},
        "shared ids": {"document_ids": ids[0]},
        "offsets": {"cu_seqlens": offsets},
        "offsets of a tensor": {"cu_seqlens": torch.tensor(offsets)},
        "shared offsets": {"cu_seqlens": offsets[0]},
        "context": {},
    }[how]


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_sequence_loss(score_fn, masked):
    torch.manual_seed(0)
    layer = moe_ext.MoELayer(
        8, 6, E, K, router=score_fn, balance=Balance("sequence", coef=0.5)
    ).double()
    x = torch.randn(2, 2, 9, 8, dtype=torch.float64)
    mask = torch.rand(2, 2, 9) < 0.6 if masked else torch.ones(2, 2, 9, dtype=torch.bool)
    mask[1, 0] = not masked
    layer(x, token_mask=mask if masked else None).mul(0).sum().backward()
    one_each = torch.zeros(4, 9, dtype=torch.int64)
    want = loss_of_documents(layer, x.flatten(0, 1), one_each, mask.flatten(0, 1))
    assert_balance_loss(layer, want)
    layer(x[..., :0, :]).sum().backward()
    assert float(layer.metrics["balance_loss"]) == 0.0


@pytest.mark.parametrize(
    "how",
    [
        "ids",
        "scattered ids",
        "shared ids",
        "offsets",
        "offsets of a tensor",
        "shared offsets",
        "context",
    ],
)
@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_documents_are_sequences(how, score_fn, masked):
    # A pack counted as one sequence: Megatron-LM #6108.
    torch.manual_seed(0)
    layer = moe_ext.MoELayer(
        8, 6, E, K, router=score_fn, balance=Balance("sequence", coef=0.5)
    ).double()
    x = torch.randn(3, 12, 8, dtype=torch.float64)
    mask = torch.rand(3, 12) < 0.6 if masked else torch.ones(3, 12, dtype=torch.bool)
    ids, told = told_by(how, DOCUMENTS)
    if masked and "document_ids" in told and how != "shared ids":
        # Padding may have any number.
        told = {"document_ids": ids.where(mask, -7)}
    around = contextlib.nullcontext()
    if how == "context":
        around = sequence_parallel(None, cu_seqlens=DOCUMENTS[2])
    with around:
        layer(x, token_mask=mask if masked else None, **told).mul(0).sum().backward()
    want = loss_of_documents(layer, x, ids, mask)
    assert_balance_loss(layer, want)
    whole = loss_of_documents(layer, x, torch.zeros_like(ids), mask)
    assert abs(want - whole).detach() > 1e-3, "a pack as one sequence is another loss"


@pytest.mark.parametrize("shape", [(0, 12), (3, 0), (0,), (1, 1), (1,)])
def test_documents_of_few_tokens(shape):
    layer = moe_ext.MoELayer(8, 6, E, 1, balance=Balance("sequence")).double()
    x = torch.randn(*shape, 8, dtype=torch.float64)
    for told in ({"document_ids": torch.zeros(shape, dtype=torch.int64)}, {"cu_seqlens": [0, 0]}):
        if "cu_seqlens" in told:
            told["cu_seqlens"].append(shape[-1])
        layer(x, **told).sum().backward()
        loss = float(layer.metrics["balance_loss"].detach())
        assert (loss > 0) == (x.numel() > 0)


@pytest.mark.parametrize("wrap", [nn.Identity, checkpoint_wrapper], ids=["plain", "wrapped"])
def test_a_transformer_block_tells_of_its_documents(wrap):
    torch.manual_seed(0)
    layer, seen = moe_ext.nn.ResidualMoE(8, 6, E, K, balance=Balance("sequence")), []
    ffn = layer if wrap is nn.Identity else wrap(layer)
    block = moe_ext.nn.TransformerBlock(8, 2, ffn).double()
    layer.moe.router.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    x = torch.randn(3, 12, 8, dtype=torch.float64)
    block(x, position_ids=torch.arange(12), cu_seqlens=DOCUMENTS[0])
    ids, _ = told_by("ids", [DOCUMENTS[0]] * 3)
    mask = torch.ones_like(ids, dtype=torch.bool)
    want = loss_of_documents(layer.moe, seen[0].view(3, 12, 8), ids, mask)
    torch.testing.assert_close(layer.moe.metrics["balance_loss"], want.detach(), **TIGHT)
    hidden = moe_ext.nn.TransformerBlock(8, 2, nn.Sequential(layer)).double()
    with pytest.raises(ValueError, match=r"ffn to take document_ids, .* got Sequential"):
        hidden(x, position_ids=torch.arange(12), cu_seqlens=DOCUMENTS[0])


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"document_ids": [0] * 12}, TypeError, r"document_ids to be of type Tensor, got \[0"),
        ({"document_ids": torch.zeros(3, 12)}, TypeError, r"document_ids to be int64, got .*32"),
        (
            {"document_ids": torch.zeros(12, 3, dtype=torch.int64)},
            ValueError,
            r"document_ids to be of shape \(3, 12\), one for each token, got \(12, 3\)",
        ),
        (
            {"document_ids": torch.full((3, 12), -1)},
            ValueError,
            r"document_ids to be at least 0, got -1",
        ),
        ({"cu_seqlens": [1, 12]}, ValueError, r"cu_seqlens to start at 0 and be sorted"),
        ({"cu_seqlens": [0, 4, 11]}, ValueError, r"cu_seqlens to end at .* 12, got 11"),
        (
            {"cu_seqlens": [[0, 12]] * 2},
            ValueError,
            r"cu_seqlens to be a row .* the 3 sequences, got 2",
        ),
        (
            {"cu_seqlens": [0, 12], "document_ids": torch.zeros(3, 12, dtype=torch.int64)},
            ValueError,
            r"document_ids or cu_seqlens to be None, got both",
        ),
    ],
)
def test_wrong_documents(told, error, message):
    layer = moe_ext.MoELayer(8, 6, E, K, balance=Balance("sequence"))
    with pytest.raises(error, match="MoELayer: expected " + message):
        layer(torch.randn(3, 12, 8), **told)


class OwnTerms(nn.Module):
    """A router with losses of its own, and another count for the balance loss."""

    def __init__(self, inner, balanced=False):
        super().__init__()
        self.inner, self.balanced = inner, balanced

    def forward(self, x_TD, *, token_mask=None):
        routed = self.inner(x_TD, token_mask=token_mask)
        first = torch.bincount(routed.gate.topk_idx[:, 0], minlength=E)
        terms = moe_ext.nn.BalanceTerms(routed.gate.score_sum, first, 1)
        losses = {"importance": routed.logits.square().sum()}
        return routed._replace(losses=losses, balance=terms)


class WithoutScores(OwnTerms):
    """A router that does not say what its scores are."""

    def forward(self, x_TD, *, token_mask=None):
        return super().forward(x_TD, token_mask=token_mask)._replace(score_fn=None)


def test_a_loss_by_sequence_wants_to_know_the_scores():
    x = micro_batches()[0]
    options = {"dtype": torch.float64}
    for balanced, coef in ((False, 0.01), (True, 0.01), (False, 0.0)):
        router = WithoutScores(make_model()[0].router, balanced)
        layer = moe_ext.MoELayer(
            8, 6, E, K, router=router, balance=Balance("sequence", coef=coef), **options
        )
        if balanced or not coef:
            layer(x)
            continue
        text = r"expected router to say what its scores .*balance='sequence', got WithoutScores"
        with pytest.raises(ValueError, match=text):
            layer(x)


@pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global_batch"])
def test_a_router_brings_its_own_losses_and_counts(scope):
    x = micro_batches()[0]
    inner = make_model()[0].router
    layer = moe_ext.MoELayer(
        8, 6, E, K, router=OwnTerms(inner), balance=Balance(scope), dtype=torch.float64
    )
    layer(x).mul(0).sum().backward()
    logits = x @ inner.weight.T
    first = torch.bincount(logits.argmax(1), minlength=E).double() / len(x)
    balance = E * (first * logits.softmax(1).mean(0)).sum()
    importance = logits.square().sum()
    torch.testing.assert_close(layer.losses["balance"], 0.01 * balance.detach(), **TIGHT)
    torch.testing.assert_close(layer.losses["importance"], importance.detach(), **TIGHT)
    torch.testing.assert_close(layer.metrics["importance_loss"], importance.detach(), **TIGHT)
    (want,) = torch.autograd.grad(0.01 * balance + importance, inner.weight)
    torch.testing.assert_close(inner.weight.grad, want, **TIGHT)


def test_a_balanced_router_gets_no_balance_loss():
    inner = make_model()[0].router
    layer = moe_ext.MoELayer(8, 6, E, K, router=OwnTerms(inner, balanced=True), dtype=torch.float64)
    layer(micro_batches()[0])
    assert set(layer.losses) == {"importance"}
    assert layer.metrics["balance_loss"] > 0


def total_gradients(loss_mode, add):
    model = make_model("micro_batch", mode=loss_mode)
    y = model(micro_batches()[0])
    loss = y.square().sum()
    (loss + collect_losses(model) if add else loss).backward()
    return gradients(model)


def test_losses_are_injected_returned_or_both():
    want = total_gradients("inject", False)
    assert_close(total_gradients("return", True), want)
    assert_close(total_gradients("inject", True), want)
    assert_close(total_gradients("both", False), want)
    none = total_gradients("return", False)
    twice = total_gradients("both", True)
    for a, b, c in zip(none, want, twice, strict=True):
        torch.testing.assert_close(c - b, b - a, rtol=1e-9, atol=1e-12)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(none, want, strict=True))


def test_returned_losses_under_checkpointing():
    want = total_gradients("inject", False)
    model = make_model("micro_batch", mode="return")
    y = checkpoint(model, micro_batches()[0].requires_grad_(), use_reentrant=False)
    (y.square().sum() + collect_losses(model)).backward()
    assert_close(gradients(model), want)


def test_a_layer_with_losses_in_the_graph_is_copied_without_them():
    model = make_model("micro_batch", mode="return")
    model(micro_batches()[0])
    assert all(term.requires_grad for term in model[0].losses.values())
    twin = copy.deepcopy(model)
    assert twin[0].losses == {}
    assert len(twin[0].metrics) == 0
    assert float(collect_losses(twin)) == 0.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Balance("batch"), ValueError, r"Balance: expected scope to be one of .*'batch'"),
        (lambda: Balance("global_batch", 3), TypeError, r"Balance: expected group .*got 3"),
        (lambda: Balance("sequence", 3), TypeError, r"Balance: expected group .*got 3"),
        (
            lambda: make_model("micro_batch", mode="add"),
            ValueError,
            r"Balance: expected mode to be one of .*, got 'add'",
        ),
        (
            lambda: moe_ext.MoELayer(8, 6, E, balance=["sequence"]),
            TypeError,
            r"MoELayer: expected balance to be of type Balance, got \['sequence'\]",
        ),
    ],
)
def test_wrong_options(make, error, message):
    with pytest.raises(error, match=message):
        make()


def warnings_of_steps(layer, steps):
    """Texts of the warnings in steps, each given as the batches of its passes."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batches in steps:
            for x in batches:
                loss = layer(x).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in found]


ACCUMULATING = [micro_batches()[:1], micro_batches()[:3]]


@pytest.mark.parametrize("mode", ["inject", "return"])
def test_passes_that_add_up_want_a_loss_scale(mode):
    layer = make_model("micro_batch", mode)[0]
    found = warnings_of_steps(copy.deepcopy(layer), ACCUMULATING)
    assert len(found) == (mode == "inject"), found
    assert all("expected moe_ext.nn.set_loss_scale(model, 1 / n)" in text for text in found)
    set_loss_scale(layer, 1.0)
    assert warnings_of_steps(layer, ACCUMULATING) == []


def late_zero_grad(layer, optimizer, x):
    loss = layer(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def two_passes_of_one_loss(layer, optimizer, x):
    optimizer.zero_grad(set_to_none=False)
    (layer(x) + layer(2 * x)).square().mean().backward()
    optimizer.step()


def recomputed_pass(layer, optimizer, x):
    checkpoint(layer, x, use_reentrant=False).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("step", [late_zero_grad, two_passes_of_one_loss, recomputed_pass])
def test_passes_that_do_not_add_up_want_no_loss_scale(step):
    layer = make_model("micro_batch")[0]
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for x in micro_batches()[:3]:
            step(layer, optimizer, x)


@pytest.mark.parametrize("counted_first", [False, True])
def test_a_step_that_goes_on_counting_is_refused(counted_first):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = micro_batches()

    def step(resets):
        if resets:
            reset_token_counts(model)
        if resets and counted_first:
            with count_tokens(model):
                [model(x) for x in batches]
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()

    step(resets=True)
    step(resets=True)
    with pytest.raises(RuntimeError, match="expected (moe_ext.nn.reset|4 training passes)"):
        step(resets=False)
