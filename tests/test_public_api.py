"""The names and signatures that users rely on are those in public_api.txt.

A change of one is seen in review: `python tests/test_public_api.py --write` writes the file anew.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

LISTED = Path(__file__).with_name("public_api.txt")
# The modules that the reference documents, each name where it is met first.
PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"


def modules():
    """(name, module) of each module in the reference."""
    for name in re.findall(r"^\.\. automodule:: (\S+)", PAGE.read_text(), re.MULTILINE):
        yield name, importlib.import_module(name)


def public():
    """(module, name, value) of each public name: those of __all__, or all that a module defines."""
    seen = []
    for module_name, module in modules():
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        for name in sorted(getattr(module, "__all__", own)):
            value = getattr(module, name)
            if not (
                name.startswith("_") or inspect.ismodule(value) or any(v is value for v in seen)
            ):
                seen.append(value)
                yield module_name, name, value


def parameters(function):
    """Names, kinds and defaults; annotations are mypy's."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(...)"
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(" at 0x[0-9a-f]+", "", text)


def described(name, value, classes=()):
    """Lines of one public name: itself, and the methods that it does not have of `classes`."""
    if inspect.isclass(value):
        yield f"class {name}{parameters(value)}"
        for member in sorted(dir(value)):
            found = inspect.getattr_static(value, member)
            owners = [c for c in value.__mro__ if member in vars(c)] or [object]
            # Where it was written: torch wraps `step` in the class of an optimizer that is made.
            written = getattr(found, "__qualname__", "").rpartition(".")[0]
            owner = next((c for c in owners if c.__qualname__ == written), owners[0])
            inherited = owner is not value and owner in classes
            if member.startswith("_") or inherited or not owner.__module__.startswith("moe_ext"):
                continue
            if isinstance(found, property):
                yield f"  {name}.{member}"
            elif isinstance(found, staticmethod | classmethod) or inspect.isfunction(found):
                yield f"  {name}.{member}{parameters(getattr(value, member))}"
    else:
        yield f"{name}{parameters(value)}" if callable(value) else name


def lines():
    found = list(public())
    classes = [value for _, _, value in found if inspect.isclass(value)]
    for module_name, name, value in found:
        for line in described(name, value, classes):
            yield f"{module_name}: {line}"


def test_public_names_and_signatures_are_the_listed_ones():
    found, listed = list(lines()), LISTED.read_text().splitlines()
    changed = [f"- {line}" for line in listed if line not in found]
    changed += [f"+ {line}" for line in found if line not in listed]
    assert not changed, "\n".join(
        ["where that is meant: python tests/test_public_api.py --write", *changed]
    )


def test_dir_shows_public_names_alone():
    for name, module in modules():
        if hasattr(module, "__all__") and hasattr(module, "__path__"):
            assert {n for n in dir(module) if not n.startswith("_")} <= {*module.__all__}, name


def test_a_renamed_argument_is_noticed():
    def gate(logits, top_k, *, scale=1.0): ...
    def renamed(logits, k, *, scale=1.0): ...

    assert list(described("gate", gate)) == ["gate(logits, top_k, *, scale=1.0)"]
    assert list(described("gate", gate)) != list(described("gate", renamed))


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    LISTED.write_text("".join(f"{line}\n" for line in lines()))
