"""Draw docs/images/pipelines*.png: every schedule of docs/pipelines.md by simulated time."""

from pathlib import Path

from moe_ext.pipeline import ASYNCHRONOUS, SCHEDULES, Costs, make_table, simulate
from moe_ext.plot import pipeline_timeline, save_figure

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
RANKS, MICRO_BATCHES = 4, 8


def main() -> None:
    """Simulate each schedule of the same model: stages of half the size where a rank has two."""
    others = ("chimera", "terapipe", *ASYNCHRONOUS)
    for picture, names in (("pipelines.png", SCHEDULES), ("pipelines_more.png", others)):
        timelines = {}
        for name in names:
            micro = 2 if name == "terapipe" else MICRO_BATCHES
            table = make_table(name, RANKS, micro)
            share = RANKS / table.num_stages
            timelines[name] = simulate(table, Costs(share, share, share))
        figure = pipeline_timeline(timelines)
        figure.axes[-1].set_xlabel("time; forward pass through the layers of a rank = 1")
        save_figure(figure, FOLDER / picture)


if __name__ == "__main__":
    main()
