"""``PYTHONPATH=examples python -m planner_searches`` prints the gaps of README.md."""

from planner_searches.gaps import table

if __name__ == "__main__":
    print(table())
