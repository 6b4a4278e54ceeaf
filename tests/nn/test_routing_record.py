"""RoutingRecord: what is recorded, its bytes, its replay and what it refuses."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_oracle import assert_all_close, outcome
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import reference
from moe_ext.nn import RecordKey, RouterOutput, RoutingRecord, TopKRouter

E, K, D = 6, 2, 8


class Block(nn.Module):
    def __init__(self, router, num_experts=E):
        super().__init__()
        self.norm = nn.LayerNorm(D, dtype=torch.float64)
        self.moe = moe_ext.MoELayer(
            D, 6, num_experts, K, router=router, balance=0.5, dtype=torch.float64
        )

    def forward(self, x, token_mask=None):
        return x + self.moe(self.norm(x), token_mask=token_mask)


class Model(nn.Module):
    def __init__(self, num_layers=3, router="softmax", num_experts=E):
        super().__init__()
        self.blocks = nn.ModuleList(Block(router, num_experts) for _ in range(num_layers))

    def forward(self, x, token_mask=None):
        for block in self.blocks:
            x = block(x, token_mask)
        return x


def drifted(model):
    """The same model after its routers went elsewhere: most choices differ."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for block in other.blocks:
            block.moe.router.weight += torch.randn_like(block.moe.router.weight)
    return other


def tokens(num_tokens=21):
    return torch.randn(num_tokens, D, dtype=torch.float64)


def record_of(model, x, step=0, micro_batch=0, **kwargs):
    record = RoutingRecord()
    with torch.no_grad(), record.recording(model, step=step, micro_batch=micro_batch):
        model(x, **kwargs)
    return record


@pytest.mark.parametrize("rows", [None, torch.arange(21)])
def test_half_a_forward_pass_leaves_the_record_as_it_was(rows):
    model, x = Model(), tokens()
    record = RoutingRecord()
    options = {} if rows is None else {"token_idx": rows, "num_rows": 21}
    if rows is not None:
        with record.recording(model, **options):
            model(x)
    before = copy.deepcopy(record)
    handle = model.blocks[2].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError), record.recording(model, **options):
        model(x + 1)
    assert record == before
    handle.remove()
    with record.recording(model, **options):
        model(x)
    assert len(record) == 3


def test_records_what_each_layer_chose():
    model, x = Model(), tokens()
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(
                lambda m, i, out, n=name: seen.update({n: out.gate.topk_idx})
            )
    record = record_of(model, x, step=3, micro_batch=1)
    assert record.layers() == ["blocks.0.moe", "blocks.1.moe", "blocks.2.moe"]
    for key in record:
        assert (key.step, key.micro_batch) == (3, 1)
        entry = record[key]
        assert entry.topk_idx.dtype == torch.int8
        assert entry.num_experts == E
        assert torch.equal(entry.topk_idx.long(), seen[f"{key.layer}.router"])
    assert record.nbytes == 3 * 21 * K
    assert "3 entries, 3 layers, 1 forward passes, 126 bytes" in repr(record)
    # Closed, it records nothing more.
    model(x)
    assert len(record) == 3


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(128, torch.int8), (129, torch.int16), (32768, torch.int16), (32769, torch.int32)],
)
def test_smallest_dtype_that_holds_the_experts(num_experts, dtype):
    record = RoutingRecord()
    record.add("moe", torch.tensor([[num_experts - 1, -1]]), num_experts)
    entry = RoutingRecord.from_bytes(record.to_bytes())[0, 0, "moe"]
    assert entry.topk_idx.dtype == dtype
    assert entry.topk_idx.tolist() == [[num_experts - 1, -1]]


@pytest.mark.parametrize("router", ["softmax", "topk_softmax", "sigmoid"])
def test_replay_of_the_same_model_changes_no_bit(router):
    model, x = Model(router=router), tokens()
    record = record_of(model, x)
    results = []
    for around in (contextlib.nullcontext(), record.replaying(model)):
        with around:
            found = outcome(model, x)
        results.append(found + [dict(block.moe.metrics) for block in model.blocks])
    assert_all_close(*results, rtol=0, atol=0)


def test_replay_weighs_the_recorded_experts_by_the_new_logits():
    model, x = Model(num_layers=1, router="sigmoid"), tokens()
    record, other = record_of(model, x), drifted(Model(num_layers=1, router="sigmoid"))
    weight = torch.randn(D, dtype=torch.float64)
    with record.replaying(other):
        y = other(x)
        (y @ weight).sum().backward()
    got = {name: p.grad for name, p in other.named_parameters()}
    other.zero_grad()
    # The layer once more, written out over the recorded choice.
    idx = record[0, 0, "blocks.0.moe"].topk_idx.long()
    moe = other.blocks[0].moe
    hidden = other.blocks[0].norm(x)
    gate = reference.gate_weights(hidden @ moe.router.weight.T, idx, score_fn="sigmoid")
    up = torch.einsum("efd,td->tef", moe.experts.gate_up_proj, hidden)
    halves = up.chunk(2, dim=-1)
    out = torch.einsum(
        "edf,tef->ted", moe.experts.down_proj, nn.functional.silu(halves[0]) * halves[1]
    )
    chosen = out.gather(1, idx[:, :, None].expand(-1, -1, D))
    want = x + (gate.topk_weights[:, :, None] * chosen).sum(dim=1)
    balance = reference.load_balance_loss(gate.score_sum, gate.num_tokens_per_expert, K)
    torch.testing.assert_close(y, want)
    ((want @ weight).sum() + 0.5 * balance).backward()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, msg=lambda m, n=name: f"{n}: {m}")
    assert got["blocks.0.moe.router.weight"].abs().max() > 0
    assert torch.equal(
        moe.metrics["num_tokens_per_expert"], torch.bincount(idx.flatten(), minlength=E)
    )


def test_micro_batches_and_steps_keep_apart():
    model, record = Model(), RoutingRecord()
    inputs = {(s, m): tokens(5 + m) for s in (0, 4) for m in (0, 1)}
    for (step, micro_batch), x in inputs.items():
        with torch.no_grad(), record.recording(model, step=step, micro_batch=micro_batch):
            model(x)
    assert len(record) == 12
    other, again = drifted(model), RoutingRecord()
    for (step, micro_batch), x in reversed(inputs.items()):
        keys = {"step": step, "micro_batch": micro_batch}
        with torch.no_grad(), record.replaying(other, **keys), again.recording(other, **keys):
            other(x)
    assert again == record
    assert set(record.agreement(again).values()) == {1.0}
    record.clear(step=0)
    assert {key.step for key in record} == {4}
    record.update(RoutingRecord())
    record.clear()
    assert len(record) == 0


def test_masks_are_recorded_and_those_of_now_hold_too():
    model, x = Model(num_layers=1), tokens()
    then, now = torch.rand(21) > 0.3, torch.rand(21) > 0.3
    record = record_of(model, x, token_mask=then)
    again = RoutingRecord()
    with torch.no_grad(), record.replaying(model), again.recording(model):
        model(x, now)
    idx = again[0, 0, "blocks.0.moe"].topk_idx
    assert torch.equal((idx >= 0).all(dim=1), then & now)
    assert torch.equal(idx[then & now], record[0, 0, "blocks.0.moe"].topk_idx[then & now])


def test_a_rollout_in_steps_is_replayed_on_a_part_of_the_batch():
    model, x = Model(), tokens(12)
    whole = record_of(model, x)
    # Prompt, then one token of each of two sequences at a time, one of which has ended.
    passes = [torch.tensor([0, 1, 2, 6, 7]), torch.tensor([3, 8]), torch.tensor([4, 9])]
    rollout = RoutingRecord()
    for rows in passes:
        with torch.no_grad(), rollout.recording(model, token_idx=rows, num_rows=12):
            model(x[rows])
    with torch.no_grad(), rollout.recording(model, token_idx=torch.tensor([5, -1]), num_rows=12):
        model(x[[5, 11]])
    left_out = [10, 11]
    for key in whole:
        entry = rollout[key].topk_idx
        kept = [row for row in range(12) if row not in left_out]
        assert torch.equal(entry[kept], whole[key].topk_idx[kept])
        assert (entry[left_out] == -2).all()
    # Replayed in another order, with a token that is not on record and one that was left out.
    other = drifted(model)
    order = torch.tensor([9, 3, -1, 10, 0])
    again, free = RoutingRecord(), record_of(other, x[[9, 3, 1, 10, 0]])
    with torch.no_grad(), rollout.replaying(other, token_idx=order), again.recording(other):
        other(x[[9, 3, 1, 10, 0]])
    first = RecordKey(0, 0, "blocks.0.moe")
    for key in again:
        recorded = [0, 1, 4]
        assert torch.equal(again[key].topk_idx[recorded], whole[key].topk_idx[[9, 3, 0]])
    assert torch.equal(again[first].topk_idx[[2, 3]], free[first].topk_idx[[2, 3]])


@pytest.mark.parametrize("mode", ["recording", "replaying"])
def test_a_recomputation_is_no_second_pass(mode):
    model, x = Model(), tokens()
    record, want = RoutingRecord(), record_of(model, x)
    context = record.recording(model) if mode == "recording" else want.replaying(model)
    with context:
        y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
        y.sum().backward()
    if mode == "recording":
        assert record == want


def test_bytes_keep_everything(tmp_path):
    record = record_of(Model(), tokens(), step=2)
    record.update(record_of(Model(), tokens(0), step=5))
    record.add("engine", torch.randint(0, 300, (7, 4)), 300, step=9, micro_batch=2)
    again = RoutingRecord.from_bytes(record.to_bytes())
    assert again == record
    assert list(again) == list(record)
    record.save(tmp_path / "routing")
    assert RoutingRecord.load(tmp_path / "routing") == record
    assert [path.name for path in tmp_path.iterdir()] == ["routing"]
    for twin in (pickle.loads(pickle.dumps(record)), copy.deepcopy(record), record.cpu()):
        assert twin == record
    assert record != record_of(Model(), tokens(), step=2)
    assert record.__eq__(3) is NotImplemented


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_change_of_a_byte_is_noticed(data):
    record = RoutingRecord()
    record.add("moe", torch.arange(12).view(6, 2), 12)
    raw = bytearray(record.to_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match=r"^RoutingRecord.from_bytes: expected "):
        RoutingRecord.from_bytes(raw)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(ValueError, match=r"^RoutingRecord.from_bytes: expected "):
        RoutingRecord.from_bytes(record.to_bytes()[:cut])


def test_bytes_of_something_else_are_refused_by_what_is_wrong():
    raw = RoutingRecord().to_bytes()
    with pytest.raises(ValueError, match=r"to be of a RoutingRecord, got 3 bytes .* b'PK\\x03'"):
        RoutingRecord.from_bytes(b"PK\x03")
    with pytest.raises(ValueError, match=r"expected version to be 1, got 2"):
        RoutingRecord.from_bytes(raw.replace(b"\n\x01", b"\n\x02"))
    with pytest.raises(ValueError, match=r"checksum .* cut short or changed"):
        RoutingRecord.from_bytes(raw + b"x")


def test_numbers_of_numpy_and_unsigned_indices_are_kept():
    one, (experts, step) = RoutingRecord(), np.array([E, 3])
    model = Model(1, num_experts=experts)
    with one.recording(model, step=step, micro_batch=step):
        model(tokens())
    chosen = one[3, 3, "blocks.0.moe"].topk_idx
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        one.add(str(dtype), chosen.to(dtype), experts, step=step)
        assert torch.equal(one[3, 0, str(dtype)].topk_idx, chosen)
    assert RoutingRecord.from_bytes(one.to_bytes()) == one
    with pytest.raises(TypeError, match="step to be an integer, got 1.5"):
        one.add("x", chosen, E, step=1.5)


def test_agreement_counts_choices_in_any_order():
    one, two = RoutingRecord(), RoutingRecord()
    one.add("a", torch.tensor([[0, 1], [2, 3], [-1, -1]]), 6)
    two.add("a", torch.tensor([[1, 0], [2, 5], [4, 4]]), 6)
    one.add("b", torch.tensor([[0]]), 6)
    assert one.agreement(two) == {RecordKey(0, 0, "a"): 0.75}
    # A rank without tokens, or with masked ones alone.
    for name, choices in (("c", torch.empty(0, 2).long()), ("d", torch.tensor([[-1, -1]]))):
        for record in (one, two):
            record.add(name, choices, 6)
        assert one.agreement(two)[RecordKey(0, 0, name)] == 1.0
    two.add("b", torch.tensor([[0]]), 7)
    with pytest.raises(ValueError, match=r"expected b at step 0, .* of 6 experts in both, got"):
        one.agreement(two)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Model(), {"step": 8}, r"expected step to be one of \[7\], got 8"),
        (
            Model(),
            {"step": 7, "micro_batch": 2},
            r"micro_batch to be one of \[1\] at step 7, got 2",
        ),
        (
            Model(4),
            {},
            r"the 4 MoE layers .* the 3 on record .* got blocks.3.moe in the model alone",
        ),
        (Model(2), {}, r"the 2 MoE layers .* the 3 on record .* got blocks.2.moe in the record"),
        (Model(num_experts=7), {}, r"expected blocks.0.moe to have 6 experts as recorded, got 7"),
        (nn.Linear(2, 2), {}, r"expected model to have a MoELayer, got none in Linear"),
    ],
)
def test_replay_refuses_another_model_or_step(model, options, message):
    record = record_of(Model(), tokens(), step=7, micro_batch=1)
    options = {"step": 7, "micro_batch": 1, **options}
    with pytest.raises(ValueError, match=r"^RoutingRecord.replaying: .*" + message):
        record.replaying(model, **options).__enter__()


def test_replay_refuses_other_shapes_by_layer():
    model = Model()
    record = record_of(model, tokens(21), step=7)
    with record.replaying(model, step=7):
        message = r"blocks.0.moe to choose 2 experts for 21 tokens as recorded at step 7, .* for 20"
        with pytest.raises(ValueError, match=message):
            model(tokens(20))
        message = r"expected blocks.1.moe to choose 2 experts .* got 3 for 21"
        model.blocks[1].moe.router.top_k = 3
        with pytest.raises(ValueError, match=message):
            model(tokens(21))
    model.blocks[1].moe.router.top_k = K
    model(tokens(20))
    with record.replaying(model, step=7, token_idx=torch.zeros(4, dtype=torch.int64)):
        model(tokens(4))
        with pytest.raises(ValueError, match=r"2 experts for 4 tokens"):
            model(tokens(5))


def test_part_of_a_model_replays_its_part():
    model, x = Model(), tokens()
    record = record_of(model, x)
    stage = Model(2)
    with record.replaying(stage, strict=False):
        stage(x)


def test_wrappers_do_not_change_the_names():
    model, x = Model(), tokens()
    wrapped = nn.Sequential()
    wrapped.module = model
    record = RoutingRecord()
    with record.recording(wrapped):
        model(x)
    assert record.layers() == ["blocks.0.moe", "blocks.1.moe", "blocks.2.moe"]
    with record.replaying(torch.compile(model, backend="eager")):
        model(x)
    alone = record_of(model.blocks[0].moe, x)
    assert alone.layers() == ["(model)"]


def test_recording_refuses_a_second_pass_and_bad_arguments():
    model, x = Model(), tokens()
    record = record_of(model, x)
    for context, message in (
        (record.recording(model), r"a new entry, got blocks.0.moe at step 0, micro-batch 0 again"),
        (record.recording(model, step=-1), r"step to be at least 0, got -1"),
        (record.recording(model, micro_batch=-1), r"micro_batch to be at least 0"),
        (record.recording(model, step=1, num_rows=3), r"num_rows together with token_idx, got num"),
    ):
        with pytest.raises(ValueError, match=r"^RoutingRecord.recording: .*" + message):
            context.__enter__()
    with record.recording(model, step=1):
        model(x)
        with pytest.raises(ValueError, match=r"expected blocks.0.moe to run once .* micro_batch"):
            model(x)
    rows = torch.arange(21)
    few = record.recording(model, step=2, token_idx=rows[:5], num_rows=21)
    with few, pytest.raises(ValueError, match=r"token_idx to be of shape \(21,\), .* got \(5,\)"):
        model(x)
    with record.recording(model, step=3, token_idx=rows, num_rows=21):
        model(x)
    longer = record.recording(model, step=3, token_idx=rows, num_rows=22)
    with longer, pytest.raises(ValueError, match=r"shape \(21, 2\) of the passes before, got"):
        model(x)
    recorded = {"token_idx": rows, "num_rows": 21}
    for method, options in ((record.recording, recorded), (record.replaying, {})):
        for wrong, error, message in (
            (rows + 1, ValueError, "token_idx to be below 21, the rows of an entry, got 21"),
            (rows > 3, TypeError, "token_idx to be int64, got torch.bool"),
        ):
            with pytest.raises(error, match=rf"^RoutingRecord.{method.__name__}: .*{message}"):
                method(model, **{**options, "token_idx": wrong}).__enter__()
    with pytest.raises(ValueError, match=r"update: expected new entries, got blocks.0.moe at step"):
        record.update(record_of(model, x))


@pytest.mark.parametrize(
    ("idx", "error", "message"),
    [
        (torch.zeros(2, 2), TypeError, "topk_idx to be of an integer dtype, got torch.float32"),
        (torch.zeros(2, dtype=torch.int32), ValueError, r"of shape \[R, K\] .* got \(2,\)"),
        (torch.zeros(2, 7, dtype=torch.int32), ValueError, r"K in 1..num_experts=6, got \(2, 7\)"),
        (torch.tensor([[0, 6]]), ValueError, r"to be in -1..5, got 6"),
        (torch.tensor([[0, -2]]), ValueError, r"to be in -1..5, got -2"),
    ],
)
def test_add_refuses(idx, error, message):
    with pytest.raises(error, match=r"^RoutingRecord.add: expected .*" + message):
        RoutingRecord().add("moe", idx, 6)


def test_add_refuses_the_same_entry_twice():
    record = RoutingRecord()
    record.add("moe", torch.tensor([[1]]), 6)
    with pytest.raises(ValueError, match=r"expected a new entry, got moe at step 0"):
        record.add("moe", torch.tensor([[1]]), 6)


def test_a_router_that_cannot_replay_is_named():
    class Own(nn.Module):
        def forward(self, x_TD, *, token_mask=None):
            logits = x_TD[:, :3]
            return RouterOutput(logits, moe_ext.ops.topk_gate(logits, 1, token_mask=token_mask))

    layer = moe_ext.MoELayer(4, 2, 3, 1, router=Own())
    x = torch.randn(6, 4)
    record = record_of(layer, x)
    with (
        record.replaying(layer),
        pytest.raises(
            TypeError,
            match=r"expected the router of \(model\) to have a method with_choice, got Own",
        ),
    ):
        layer(x)


def test_recording_a_compiled_model_breaks_the_graph_and_records():
    model, x = Model(num_layers=1), tokens()
    want = record_of(model, x)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    record = RoutingRecord()
    with torch.no_grad(), record.recording(model):
        compiled(x)
    assert record == want
