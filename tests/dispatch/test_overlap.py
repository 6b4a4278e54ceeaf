"""`Dispatch(overlap=)`: rows travel beside the experts, and results are those of one exchange."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dispatchers import sent_messages, tokens
from layer_oracle import outcome
from rank_checks import Checks
from torch._dynamo import compiled_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext.comm import collectives, shared_memory
from moe_ext.dispatch import rows as exchanges
from moe_ext.distributed import HierarchicalDispatcher
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn import experts

E, D = 12, 8  # E is a multiple of every group size used


def make(overlap, dispatcher="alltoall", combine="exact", **options):
    torch.manual_seed(3)
    way = moe_ext.nn.Dispatch(dispatcher, combine=combine, overlap=overlap)
    options = {"shared_expert": 5, **options}
    return moe_ext.MoELayer(D, 6, E, 3, ep_group=dist.group.WORLD, dispatcher=way, **options)


def loss(layer, x):
    return layer(x).square().sum()


def ways():
    """Dispatchers and combines that send in parts."""
    found = [{}, {"dispatcher": "dedup"}, {"dispatcher": "dedup", "combine": "reduced"}]
    for by in ("exact", "reduced"):
        made = HierarchicalDispatcher(E, dist.group.WORLD, node_size=2, combine=by)
        found.append({"dispatcher": made})
    return found


def check_results_are_those_of_one_exchange():
    # Ranks with fewer tokens than parts, and one with none.
    x = tokens((7, 40, 0, 2)[dist.get_rank()], D, torch.float64)
    for bias in (False, True):  # experts weigh their rows, or do not
        want = outcome(make(1, dtype=torch.float64, bias=bias), x)
        for options in ways():
            cut = make(3, dtype=torch.float64, bias=bias, **options)
            found = outcome(cut, x)
            # Products of other numbers of rows add up in another order.
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)
            with torch.no_grad():
                assert torch.equal(cut(x), found[0])
            assert int(cut.metrics["num_dropped"]) == 0


def check_auto_chooses_what_sends_in_parts():
    x = tokens(12, D, torch.float64)
    layer = make(3, dtype=torch.float64, dispatcher="auto")
    torch.testing.assert_close(
        outcome(layer, x), outcome(make(1, dtype=torch.float64), x), rtol=1e-12, atol=1e-13
    )
    plan, sizes = layer.dispatcher.plan, []

    def watched(*args, **options):
        found = plan(*args, **options)
        sizes.append(len(found.parts))
        return found

    with mock.patch.object(layer.dispatcher, "plan", watched):
        layer(x)
    assert sizes == [3]


def check_counts_of_all_parts_are_one_message():
    for options in ways():
        calls = []
        for overlap in (1, 4):
            layer, x = make(overlap, shared_expert=0, **options), tokens(40, D)
            layer(x)
            with sent_messages() as sent:
                layer(x.requires_grad_()).sum().backward()
            calls.append([call.args[1].shape[1:] for call in sent.call_args_list])
        whole, parts = calls
        # By part travel rows of D columns, there and back, forward and backward, and weights beside
        # them; those of a dispatcher that sends each token once come with the indices.
        by_part = [(D,)] if options else [(D,), (1,)]
        by_part = sum(tuple(shape) in by_part for shape in whole)
        assert len(parts) == len(whole) + 3 * by_part, (options, whole, parts)


def check_bits_between_networks_are_those_on_one_host():
    layer, x = make(1), tokens((7, 40, 0, 2)[dist.get_rank()], D)
    want = outcome(layer, x)
    known = shared_memory.known.pop(dist.group.WORLD)
    with (
        mock.patch.object(shared_memory, "network_identity", dist.get_rank),
        mock.patch.object(collectives, "_LEAST_BYTES", 1),
        sent_messages() as sent,
    ):
        found = outcome(layer, x)
    shared_memory.known[dist.group.WORLD] = known
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    sizes = [call.args[3:5] for call in sent.call_args_list if call.args[3] is not None]
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    # Rows, weights, results, and their gradients, each as two messages that go one way.
    assert len(sizes) == 12
    for i, (send, receive) in enumerate(sizes):
        wrong = [p < rank if i % 2 == 0 else p >= rank for p in ranks]
        assert not any(size for size, none in zip(send, wrong, strict=True) if none)
        wrong = [p > rank if i % 2 == 0 else p <= rank for p in ranks]
        assert not any(size for size, none in zip(receive, wrong, strict=True) if none)


def check_rows_are_underway_while_experts_run():
    for options in ways():
        watch_rows_underway(options)


@contextlib.contextmanager
def watching(underway):
    """Counts the exchanges of rows, without their weights, that have begun and not ended."""

    class Watched(exchanges._RowsUnderway):
        def start(self, rows, backward):
            underway[0] += not self.operation.endswith(" weights")
            super().start(rows, backward)

        def finish(self, *args, **options):
            underway[0] -= not self.operation.endswith(" weights")
            return super().finish(*args, **options)

    with mock.patch.object(exchanges, "_RowsUnderway", Watched):
        yield


def watch_rows_underway(options):
    layer = make(4, shared_expert=0, **options)
    x = tokens(40, D).requires_grad_()
    underway, forward, backward = [0], [], []

    def note(module, given, out):
        forward.append(underway[0])
        out.register_hook(lambda grad: backward.append(underway[0]))

    layer.experts.register_forward_hook(note)
    with watching(underway):
        layer(x).square().sum().backward()
    # The next part's rows and the last part's results.
    assert forward == [1, 2, 2, 1] and backward == [1, 2, 2, 1] and underway == [0], options


class NoteProducts(TorchDispatchMode):
    """Notes exchanges underway at the products for rows and for weights, in their order."""

    def __init__(self, underway):
        super().__init__()
        self.underway, self.found = underway, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("moe_ext::")
        if name.endswith("grouped_mm"):
            self.found.append(("rows", self.underway[0]))
        if name.startswith("_grouped_mm_backward_weight"):
            self.found.append(("weights", self.underway[0]))
        return func(*args, **(kwargs or {}))


def products_of(layer, x):
    """The products of a backward pass, with the exchanges underway."""
    underway = [0]
    with watching(underway):
        y = layer(x.clone().requires_grad_())
        with NoteProducts(underway) as noted:
            y.square().sum().backward()
    return noted.found


def check_weight_gradients_are_computed_while_those_of_rows_travel():
    x = tokens(40, D)
    for options in (*ways(), {"dispatcher": "allgather"}):
        for again in (False, True):  # the second time gradients are added to those that are there
            layer = make(1, shared_expert=0, **options)
            if again:
                outcome(layer, x)
            found = products_of(layer, x)
            assert found == [("rows", 0)] * 2 + [("weights", 1)] * 2, (options, found)
        if options.get("dispatcher") != "allgather":
            found = products_of(make(3, shared_expert=0, **options), x)
            # Beside the products of a part travel the rows of the one behind it.
            want = [("rows", 1)] * 2 + [("rows", 2)] * 2 + [("weights", 2)] * 2
            want += [("rows", 1)] * 2 + [("weights", 1)] * 4
            assert found == want, (options, found)


def check_late_weight_gradients_have_the_same_bits():
    x = tokens((7, 40, 0, 2)[dist.get_rank()], D)

    def steps(**options):
        made = make(**options)
        inner = made.experts
        for recompute, cast in zip(
            ("none", "full", "selective"), (False, False, True), strict=True
        ):
            run = made
            if recompute == "full":
                run = functools.partial(checkpoint, made, use_reentrant=False)
            if recompute == "selective":
                made.experts = checkpoint_wrapper(inner)
            for are_there in (False, True):  # gradients
                given = x.clone().requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                    y = run(given)
                y.float().square().sum().backward()
                yield are_there, [y, given.grad, *[p.grad.clone() for p in made.parameters()]]
            made.zero_grad()

    for overlap, options in [(3, {}), *((1, way) for way in ways())]:
        found = list(steps(overlap=overlap, **options))
        with mock.patch.object(experts, "_runtime_library", mock.Mock(load=lambda: None)):
            want = list(steps(overlap=overlap, **options))
        for (are_there, one), (_, other) in zip(found, want, strict=True):
            for place, (a, b) in enumerate(zip(one, other, strict=True)):
                if overlap == 1 or place < 2 or not are_there:
                    assert torch.equal(a, b), (overlap, options)
                    continue
                # The product of each part is added to what is there: a sum in another order, whose
                # terms are taken to be no larger than the largest sum.
                a, b = local_part(a).detach(), local_part(b).detach()
                bound = (1 + overlap) ** 2 * torch.finfo(a.dtype).eps * b.abs().max()
                assert (a - b).abs().max() <= bound, (overlap, options)


def check_gradients_that_are_asked_for_alone():
    layer, x = make(1), tokens(9, D).requires_grad_()
    weights = [layer.experts.gate_up_proj, layer.experts.down_proj]
    want = outcome(layer, x)
    y = layer(x).square().sum()
    for wanted in ([x], weights, [x], [x, *weights]):
        found = torch.autograd.grad(y, wanted, retain_graph=True)
        by_id = {id(x): want[1], **{id(w): w.grad for w in weights}}
        assert all(torch.equal(f, by_id[id(w)]) for f, w in zip(found, wanted, strict=True))


def check_products_are_added_to_parts_of_gradients():
    layer, x = make(1), tokens(9, D)
    weights = [layer.experts.gate_up_proj, layer.experts.down_proj]
    alone = [grad.to_local().clone() for grad in torch.autograd.grad(loss(layer, x), weights)]

    def expect(num_added):
        """Run a backward pass: so many products are added at once, and the sum has its bits."""
        before = [weight.grad for weight in weights]
        want = [grad.full_tensor() for grad in before]
        want = [
            grad + DTensor.from_local(own, weight.device_mesh, weight.placements).full_tensor()
            for grad, own, weight in zip(want, alone, weights, strict=True)
        ]
        found = loss(layer, x)
        with torch.profiler.profile() as profile:
            found.backward()
        calls = {event.key: event.count for event in profile.key_averages()}
        assert calls.get("moe_ext::_grouped_mm_backward_weight_add_", 0) == num_added
        for weight, grad, whole in zip(weights, before, want, strict=True):
            assert weight.grad is grad and type(grad) is DTensor
            assert torch.equal(grad.full_tensor(), whole)

    loss(layer, x).backward()
    expect(2)
    expect(2)
    # A gradient that every rank holds whole has no part that products could be added to.
    weights[0].grad = weights[0].grad.redistribute(placements=[Replicate()])
    expect(1)
    seen = []
    hook = weights[1].register_hook(lambda grad: seen.append((grad * 2).to_local()))
    expect(0)
    assert torch.equal(seen[0], 2 * alone[1])
    hook.remove()


def check_compiled_autograd_is_refused():
    found = loss(make(1), tokens(9, D))
    text = "compiled autograd: expected experts to be plain tensors"
    with compiled_autograd._enable(torch.compile), pytest.raises(NotImplementedError, match=text):
        found.backward()


def check_a_router_that_fails_is_told():
    for options in ways():
        layer, x = make(3, **options), tokens(9, D)
        want = layer(x)

        def fail(*args):
            raise ValueError("no route")

        hook = layer.router.register_forward_pre_hook(fail) if dist.get_rank() == 1 else None
        with pytest.raises(ValueError, match="no route"):
            layer(x)
        if hook is not None:
            hook.remove()
        assert torch.equal(layer(x), want)


def check_no_part_is_refused():
    with pytest.raises(ValueError, match="expected overlap to be at least 1, got 0"):
        make(0)


test_over_ranks = Checks.of(globals()).test(4)


def test_one_rank_sends_nothing():
    layer = moe_ext.MoELayer(D, 6, E, 3, dispatcher=moe_ext.nn.Dispatch(overlap=4))
    assert layer(torch.randn(5, D)).shape == (5, D)
