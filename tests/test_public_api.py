"""The names and signatures that users rely on are those of docs/api/, written from the package.

A change of one is seen in review: `python tests/test_public_api.py --write` writes the pages anew.
"""

import difflib
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Its table names the modules; a name stands on the page of the first that has it.
INDEX = DOCS / "api.md"
BEGIN, END = "<!-- names, by tests/test_public_api.py -->", "<!-- end of names -->"


def modules():
    """(name, module) of each module in the reference."""
    for name in re.findall(r"^\| \[([\w.]+)\]", INDEX.read_text(), re.MULTILINE):
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


def summary(value):
    """The first sentence of a docstring, or nothing."""
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.sub(r"``", "`", paragraph)


def members(value, classes=()):
    """(signature, summary) of each method and property that is not one of `classes`."""
    for name in sorted(dir(value)):
        found = inspect.getattr_static(value, name)
        owners = [c for c in value.__mro__ if name in vars(c)] or [object]
        # The class that wrote it: torch wraps `step` in the class of an optimizer that is made.
        written = getattr(found, "__qualname__", "").rpartition(".")[0]
        owner = next((c for c in owners if c.__qualname__ == written), owners[0])
        inherited = owner is not value and owner in classes
        if name.startswith("_") or inherited or not owner.__module__.startswith("moe_ext"):
            continue
        if isinstance(found, property):
            yield name, summary(found)
        elif isinstance(found, staticmethod | classmethod) or inspect.isfunction(found):
            signature = re.sub(r"^\(self(, )?", "(", parameters(getattr(value, name)))
            yield f"{name}{signature}", summary(getattr(value, name))


def described(name, value, classes=()):
    """Markdown of one public name: itself, and the methods that it does not have of `classes`."""
    yield f"\n## {name}\n"
    if not callable(value):
        yield f"A constant: `{list(value) if isinstance(value, dict) else value!r}`"
        return
    line = f"{'class ' if inspect.isclass(value) else ''}{name}{parameters(value)}"
    yield f"```python\n{textwrap.fill(line, 100, subsequent_indent='    ')}\n```\n"
    yield summary(value)
    if inspect.isclass(value):
        found = list(members(value, classes))
        yield from [""] * bool(found)
        for signature, said in found:
            yield f"- `{signature}`" + f": {said}" * bool(said)


def pages():
    """The text of each page of docs/api/."""
    found = list(public())
    classes = [value for _, _, value in found if inspect.isclass(value)]
    for module_name, module in modules():
        lines = [f"# {module_name}", "", summary(module), "", BEGIN]
        for home, name, value in found:
            if home == module_name:
                lines += described(name, value, classes)
            elif name in getattr(module, "__all__", ()) and getattr(module, name) is value:
                lines += [f"\n`{name}` is on the page of [{home}]({home}.md)."]
        yield DOCS / "api" / f"{module_name}.md", "\n".join([*lines, "", END, ""])


def test_public_names_and_signatures_are_the_listed_ones():
    meant = "where that is meant: python tests/test_public_api.py --write"
    expected = dict(pages())
    assert set((DOCS / "api").iterdir()) == set(expected), meant
    for path, text in expected.items():
        lines = path.read_text().splitlines(), text.splitlines()
        changed = list(difflib.unified_diff(*lines, path.name, "the package", lineterm="", n=0))
        assert not changed, "\n".join([meant, *changed])


def test_dir_shows_public_names_alone():
    for name, module in modules():
        if hasattr(module, "__all__") and hasattr(module, "__path__"):
            assert {n for n in dir(module) if not n.startswith("_")} <= {*module.__all__}, name


def test_a_renamed_argument_is_noticed():
    def gate(logits, top_k, *, scale=1.0): ...
    def renamed(logits, k, *, scale=1.0): ...

    assert "\ngate(logits, top_k, *, scale=1.0)\n" in "".join(described("gate", gate))
    assert list(described("gate", gate)) != list(described("gate", renamed))


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    (DOCS / "api").mkdir(exist_ok=True)
    written = dict(pages())
    for stale in set((DOCS / "api").iterdir()) - set(written):
        stale.unlink()
    for path, text in written.items():
        path.write_text(text)
