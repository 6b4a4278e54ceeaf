"""Draw docs/images/pipelines.png: every schedule of docs/pipelines.md by simulated time."""

from pathlib import Path

from moe_ext.pipeline import SCHEDULES, Costs, make_table, simulate
from moe_ext.plot import pipeline_timeline

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "pipelines.png"
RANKS, MICRO_BATCHES = 4, 8


def main() -> None:
    """Simulate each schedule of the same model: stages of half the size where a rank has two."""
    timelines = {}
    for name in SCHEDULES:
        table = make_table(name, RANKS, MICRO_BATCHES)
        share = RANKS / table.num_stages
        timelines[name] = simulate(table, Costs(share, share, share))
    pipeline_timeline(timelines, PICTURE)


if __name__ == "__main__":
    main()
