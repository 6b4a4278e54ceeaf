"""``python -m moe_ext.planner.searches`` prints the gaps of docs/planner_searches.md."""

from moe_ext.planner.searches.gaps import table

if __name__ == "__main__":
    print(table())
