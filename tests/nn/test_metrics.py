"""Metrics of a layer: their formulas, what reading them costs, and where they go."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_overhead import Calls
from test_routing_record import Model, tokens
from torch import nn

import moe_ext
from moe_ext.nn import LayerMetrics, log_metrics, reduce_metrics

DERIVED = {"load", "load_entropy", "load_cv", "max_over_mean", "dropped_fraction"}


def metrics_of(counts, dropped=0):
    return LayerMetrics(
        {"num_tokens_per_expert": torch.tensor(counts), "num_dropped": torch.tensor(dropped)}
    )


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 1000), min_size=1, max_size=20), data=st.data())
def test_formulas(counts, data):
    total, n = sum(counts), len(counts)
    dropped = data.draw(st.integers(0, total))
    metrics = metrics_of(counts, dropped)
    share = [c / max(1, total) for c in counts]
    mean = total / n
    spread = math.sqrt(sum((c - mean) ** 2 for c in counts) / n)
    want = {
        "load_entropy": -sum(p * math.log(p) for p in share if p > 0),
        "load_cv": spread / mean if total else 0.0,
        "max_over_mean": max(counts) / mean if total else 0.0,
        "dropped_fraction": dropped / max(1, total),
    }
    for name, value in want.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert metrics["load"].tolist() == pytest.approx(share, rel=1e-6)
    assert all(metrics[name].dtype == torch.float32 for name in DERIVED)


def test_balanced_and_concentrated_loads():
    balanced, one = metrics_of([5, 5, 5, 5]), metrics_of([0, 20, 0, 0], 15)
    assert balanced["load_entropy"].item() == pytest.approx(math.log(4))
    assert (balanced["load_cv"].item(), balanced["max_over_mean"].item()) == (0.0, 1.0)
    assert (one["load_entropy"].item(), one["max_over_mean"].item()) == (0.0, 4.0)
    assert one["load_cv"].item() == pytest.approx(math.sqrt(3))
    assert one["dropped_fraction"].item() == 0.75


def test_a_layer_has_them_all_and_computes_none_unless_read():
    layer = moe_ext.MoELayer(8, 6, 5, 2, capacity=0.5)
    x = torch.randn(30, 8)
    with Calls() as calls:
        layer(x)
    forward = len(calls.names)
    assert forward < 12
    metrics = layer.metrics
    with Calls() as calls:
        names = set(metrics)
        assert len(metrics) == len(names)
        assert "LayerMetrics(" in repr(metrics)
    assert calls.names == []
    assert names >= DERIVED | {"num_tokens_per_expert", "num_dropped", "balance_loss", "z_loss"}
    with Calls() as calls:
        metrics["load_cv"]
        first = len(calls.names)
        metrics["load_cv"]
    assert 0 < first == len(calls.names)
    # Neither reading waits for the device.
    assert not {"aten::_local_scalar_dense", "aten::item"} & set(calls.names)
    assert 0 < metrics["dropped_fraction"] < 1
    with pytest.raises(KeyError, match=r"expected a name of a metric \(.*load_cv.*\), got 'lode'"):
        metrics["lode"]
    with pytest.raises(KeyError, match=r"none before the first forward pass\), got 'load'"):
        moe_ext.MoELayer(8, 6, 5).metrics["load"]


def test_entries_are_computed_once_and_detached():
    calls = []
    weight = torch.ones((), requires_grad=True)

    def value():
        calls.append(1)
        return 2 * weight

    metrics = LayerMetrics({"lazy": value})
    assert set(metrics) == {"lazy"}
    assert metrics["lazy"] is metrics["lazy"]
    assert not metrics["lazy"].requires_grad
    assert calls == [1]
    assert "load" not in metrics
    assert dict(LayerMetrics({})) == {}


def test_the_metrics_of_no_group_are_the_same():
    layer = moe_ext.MoELayer(8, 6, 5, 2)
    layer(torch.randn(30, 8))
    reduced = reduce_metrics(layer.metrics, None)
    assert set(reduced) == set(layer.metrics)
    for name, value in reduced.items():
        assert torch.equal(value, layer.metrics[name])
    with pytest.raises(TypeError, match="^reduce_metrics: "):
        reduce_metrics(layer.metrics, "world")


class Writer:
    def __init__(self):
        self.rows = {}

    def add_scalar(self, tag, scalar_value, global_step):
        assert isinstance(scalar_value, float)
        self.rows[tag, global_step] = scalar_value


def test_log_metrics_writes_every_number_of_every_layer():
    model, writer = Model(2), Writer()
    log_metrics(writer, model, 0)
    assert writer.rows == {}
    model(tokens())
    log_metrics(writer, model, 7, prefix="train")
    for index in range(2):
        metrics = model.blocks[index].moe.metrics
        for name in ("balance_loss", "z_loss", "num_dropped", *(DERIVED - {"load"})):
            tag = f"train/{name}/blocks.{index}.moe"
            assert writer.rows[tag, 7] == pytest.approx(metrics[name].item(), rel=1e-6)
    assert len(writer.rows) == 2 * 7
    with pytest.raises(
        ValueError, match=r"^log_metrics: expected model to have a MoELayer, got no"
    ):
        log_metrics(writer, nn.Linear(2, 2), 0)


def test_tensorboard_reads_what_log_metrics_wrote(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = Model(1)
    with moe_ext.plot.summary_writer(tmp_path) as writer:
        for step in range(3):
            model(tokens())
            log_metrics(writer, model, step)
    events = EventAccumulator(str(tmp_path)).Reload()
    rows = events.Scalars("moe/max_over_mean/blocks.0.moe")
    assert [row.step for row in rows] == [0, 1, 2]
    want = model.blocks[0].moe.metrics["max_over_mean"].item()
    assert rows[-1].value == pytest.approx(want)
