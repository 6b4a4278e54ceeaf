"""Write the table of docs/planner_families.md: sizes that the planner reads of each family.

Each causal language model with its default configuration, on the meta device.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "planner_families.md"
BEGIN, END = "<!-- families: tools/planner_families.py -->\n", "<!-- end of families -->\n"


def families() -> Iterator[tuple[str, Any]]:
    """Names of families, and the classes of their configurations."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, logging

    logging.set_verbosity_error()
    for config in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield config.model_type, config


def read(config: Any) -> tuple[int, float | str] | None:
    """Parameters of a family's model, and by which share the spec is off, or why it is refused.

    None for a family whose default configuration makes no model.
    """
    from transformers import AutoModelForCausalLM

    from moe_ext.planner import model_spec

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config())
    # A family's code may fail in any way on sizes that it has no default of.
    except Exception:
        return None
    count = sum(p.numel() for p in model.parameters())
    try:
        return count, model_spec(model).parameters() / count - 1
    except ValueError as error:
        return count, str(error)


def table() -> str:
    """The two tables of the page."""
    exact, near, refused, without = [], [], [], []
    for name, config in sorted(families(), key=lambda each: each[0]):
        found = read(config)
        if found is None:
            without.append(name)
        elif isinstance(found[1], str):
            refused.append((name, _short(found[1])))
        elif round(found[1], 4) == 0:
            exact.append(name)
        else:
            near.append(f"{name} {100 * found[1]:+.2f} %")
    rows = [
        "| parameters by the spec | families |",
        "|---|---|",
        f"| those of the model ({len(exact)}) | {', '.join(exact)} |",
        f"| within 1 % ({len(near)}) | {', '.join(near)} |",
        f"| none: no model of the default configuration ({len(without)}) | {', '.join(without)} |",
        "",
        f"| refused ({len(refused)}) | what has no cost |",
        "|---|---|",
        *(f"| {name} | {why} |" for name, why in refused),
    ]
    return "\n".join(rows) + "\n"


def _short(message: str) -> str:
    """The part of a refusal behind what was expected."""
    text = message.splitlines()[0].replace("; give a ModelSpec", "")
    missing = re.search(r"to have (.*), a whole number of .*, got (.*)", text)
    if missing:
        return f"its {missing[1]} is {missing[2]}"
    text = re.sub(r"^.*?got (\d+; )?", "", text)
    return text.partition(". ")[0].replace("|", "\\|")


def main() -> None:
    """Write the page, or print the tables with --print."""
    made = table()
    if "--print" in sys.argv:
        print(made)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}")


if __name__ == "__main__":
    main()
