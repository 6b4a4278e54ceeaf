"""The pictures: what they are made of, that they are written whole, and what is refused."""

import builtins

import pytest
import torch
from torch import nn

import moe_ext
from moe_ext import plot
from moe_ext.nn import RoutingRecord
from moe_ext.pipeline import Costs, make_table, simulate

pytest.importorskip("matplotlib")


class Model(nn.Module):
    def __init__(self, num_layers=3, num_experts=8):
        super().__init__()
        self.blocks = nn.ModuleList(moe_ext.MoELayer(8, 4, num_experts) for _ in range(num_layers))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def record_of(model, num_tokens=40):
    record = RoutingRecord()
    with torch.no_grad(), record.recording(model):
        model(torch.randn(num_tokens, 8))
    return record


def image_of(figure, panel=0):
    return torch.tensor(figure.axes[panel].images[0].get_array().filled(float("nan"))).double()


def test_load_of_a_model_and_of_its_record_are_the_same_picture(tmp_path):
    model = Model()
    record = record_of(model)
    counts = torch.stack([block.metrics["num_tokens_per_expert"] for block in model.blocks])
    for source in (model, record, {str(i): row.tolist() for i, row in enumerate(counts)}):
        figure = plot.expert_load(source, tmp_path / "load.png")
        torch.testing.assert_close(image_of(figure), counts.double() * 8 / (2 * 40))
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["load.png"]


def test_load_over_steps_is_a_panel_a_layer_scaled_row_by_row():
    history = torch.randint(0, 9, (5, 2, 4))
    history[3] = 0
    figure = plot.expert_load(history, steps=[10, 20, 30, 40, 50])
    for layer in range(2):
        rows = history[:, layer].double()
        want = rows * 4 / rows.sum(dim=1, keepdim=True).clamp(min=1)
        assert torch.equal(image_of(figure, layer), want.T)
        assert list(figure.axes[layer].images[0].get_extent()[:2]) == [10, 51]
    many = plot.expert_load({"layer": torch.ones(1000, 3)})
    assert image_of(many).shape == (3, plot.MAX_COLUMNS)
    assert (image_of(many) == 1).all()


def test_layers_may_have_different_numbers_of_experts():
    image = image_of(plot.expert_load({"a": torch.ones(4), "b": torch.ones(2)}))
    assert image.isnan().tolist() == [[False] * 4, [False, False, True, True]]


@pytest.mark.parametrize(
    ("load", "options", "message"),
    [
        ({}, {}, r"counts \[E\] of each layer, or \[N, E\] of each, got {}"),
        ({"a": [1, 2], "b": [[1, 2]]}, {}, r"got {'a': \(2,\), 'b': \(1, 2\)}"),
        ({"a": torch.zeros(0, 4)}, {}, r"got {'a': \(0, 4\)}"),
        (torch.ones(3, 4), {}, r"a tensor \[N, L, E\], .* got shape \(3, 4\)"),
        (torch.ones(3, 2, 4), {"steps": [1]}, r"steps to number the \[3\] rows of load, got 1"),
        ({"a": [[1]], "b": [[1], [1]]}, {}, r"to number the \[1, 2\] rows of load, got 2"),
        (Model(), {}, r"got {}"),
    ],
)
def test_expert_load_refuses(load, options, message):
    with pytest.raises(ValueError, match=r"^expert_load: expected .*" + message):
        plot.expert_load(load, **options)


def test_flow_counts_pairs_of_choices():
    record = RoutingRecord()
    record.add("a", torch.tensor([[0, 1], [2, -1], [0, 2]]), 3)
    record.add("b", torch.tensor([[1], [0], [-1]]), 2)
    counts = plot.routing_flow_counts(record, "a", "b")
    assert counts.tolist() == [[0, 1], [0, 1], [1, 0]]


def test_flow_of_a_model_has_a_bar_an_expert_and_a_band_a_pair(tmp_path):
    model = Model()
    record = record_of(model)
    figure = plot.routing_flow(record, tmp_path / "flow.png")
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
    counts = [
        plot.routing_flow_counts(record, a, b) for a, b in zip(names, names[1:], strict=False)
    ]
    bars = [container.patches for container in axes.containers]
    assert [len(column) for column in bars] == [8, 8, 8]
    heights = torch.tensor([float(bar.get_height()) for bar in bars[0]])
    torch.testing.assert_close(heights / heights.sum(), counts[0].sum(dim=1) / 160.0)
    bands = len(axes.patches) - 24
    assert bands == sum(int((count > 0).sum()) for count in counts)
    few = plot.routing_flow(record, max_flows=3).axes[0]
    assert len(few.patches) - 24 == 6
    assert (tmp_path / "flow.png").read_bytes().startswith(b"\x89PNG")


def test_flow_refuses_by_layer():
    record = record_of(Model(num_layers=1))
    with pytest.raises(
        ValueError, match=r"at least 2 layers on record at step 0, .* got \['blocks"
    ):
        plot.routing_flow(record)
    with pytest.raises(ValueError, match=r"at step 5, micro-batch 0, got \[\]"):
        plot.routing_flow(record, step=5)
    with pytest.raises(ValueError, match=r"one of \['blocks.0'\], got 'blocks.9'"):
        plot.routing_flow(record, layers=["blocks.0", "blocks.9"])
    record.add("shorter", torch.zeros(3, 1, dtype=torch.int64), 8)
    with pytest.raises(
        ValueError, match=r"blocks.0 and shorter to have as many tokens, got 40 and 3"
    ):
        plot.routing_flow(record)


def test_missing_packages_are_named_with_what_to_type(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith(("matplotlib", "torch.utils.tensorboard")):
            raise ImportError(f"no {name}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"expert_load: .* try `pip install matplotlib`"):
        plot.expert_load({"a": [1, 2]})
    with pytest.raises(ImportError, match=r"summary_writer: .* try `pip install tensorboard`"):
        plot.summary_writer(tmp_path)


def test_timelines_have_a_box_for_each_action(tmp_path):
    table = make_table("dual-pipe-v", 2, 4)
    timeline = simulate(table, Costs(weight_gradient=0.5))
    figure = plot.pipeline_timeline({"V": timeline, "same": timeline}, tmp_path / "v.png")
    for axes in figure.axes:
        boxes = [(p.get_x(), p.get_width()) for p in axes.patches]
        spans = [
            (span.start, span.end - span.start)
            for row in timeline.spans
            for span in row
            for _ in span.action.parts or (0,)
        ]
        assert boxes == spans
        assert axes.get_title("left").endswith(f"{timeline.bubble_share:.1%} idle")
    assert (tmp_path / "v.png").stat().st_size > 1000
    (legend,) = figure.legends
    forward, *_, shade, idle, number = (text.get_text() for text in legend.get_texts())
    assert (forward, idle, number) == ("forward", "idle", "number: micro-batch")
    assert shade == "darker: a rank's second stage"
    plain = plot.pipeline_timeline(simulate(make_table("terapipe", 2, 2)))
    (legend,) = plain.legends
    found = [text.get_text() for text in legend.get_texts()]
    assert found == ["forward", "backward", "idle", "number: micro-batch.slice"]
    assert len(plain.axes) == 1
    with pytest.raises(ValueError, match="pipeline_timeline: expected timelines to be at least"):
        plot.pipeline_timeline({})
