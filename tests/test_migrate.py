"""What docs/migrate.md says exists."""

import importlib
import re
from pathlib import Path

from moe_ext.integrations.state_dict import LAYOUTS

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "migrate.md").read_text()


def test_imports_work():
    pattern = r"^from (moe_ext\S*) import (?:\(([^)]+)\)|(.+))$"
    found = re.findall(pattern, TEXT, re.MULTILINE)
    assert len(found) >= 7
    for module, *names in found:
        for name in re.findall(r"\w+", " ".join(names)):
            assert hasattr(importlib.import_module(module), name), (module, name)


def test_every_layout_has_a_row():
    table = TEXT.split("\n## Checkpoints\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(LAYOUTS)
