"""The shape of the package: which folder may use which, and who talks to c10d.

Floors from the ground up; a module imports from its own floor and from those below it.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = (
    ("",),  # _library, _runtime_library, _version
    ("ops", "reference"),
    ("comm",),
    ("distributed",),
    ("dispatch",),
    ("nn", "attention"),
    ("compression", "pipeline", "sync"),
    ("optim",),
    ("integrations",),
    ("planner",),
)
# What uses everything, and is used by nothing.
TOP = {"moe_ext", "moe_ext.__main__", "moe_ext._info", "moe_ext.plot", "moe_ext.testing"}
# Types, for annotations; moe_ext.comm is who calls c10d.
C10D_TYPES = {"ProcessGroup", "DeviceMesh", "DTensor", "GradBucket", "Work"}
# Modules beside moe_ext.comm, and the names of torch.distributed that each takes.
BESIDE_COMM = {
    "moe_ext._runtime_library": {"is_available"},  # asks whether torch has c10d at all
    "moe_ext.dispatch.symmetric_memory": {"torch.distributed._symmetric_memory"},
    "moe_ext.distributed.fsdp": {"fsdp"},
    "moe_ext.distributed.fsdp_state": {"_composable_state"},
    "moe_ext.distributed.mesh": {"torch.distributed"},  # makes groups
}
# Messages of ranks beside an `Agreement`, and the modules that send them.
TELLS = {
    "SummedOptions",
    "check_equal_over_ranks",
    "is_told",
    "mark_told",
    "meet",
    "name_failed_ranks",
    "naming_failed_ranks",
    "share",
    "telling",
}
BESIDE_AGREEMENT = {
    # Options go with sums that are made in any case.
    "moe_ext.attention.sharding": {"SummedOptions"},
    "moe_ext.nn.balance.selection_bias": {"SummedOptions"},
    "moe_ext.optim._sliced": {"SummedOptions"},
    # The message is numbers alone, of which a part is compared.
    "moe_ext.compression.gradients": {"share"},
    "moe_ext.compression.report": {"check_equal_over_ranks", "share"},
    "moe_ext.dispatch.counts": {"check_equal_over_ranks"},
    "moe_ext.dispatch.symmetric_memory": {"share"},
    "moe_ext.distributed.clipping": {"check_equal_over_ranks"},
    "moe_ext.distributed.gradients": {"check_equal_over_ranks"},
    "moe_ext.nn.balance.moved": {"share"},
    # Others send: torch, a library, a codec of the user, or autograd.
    "moe_ext.compression.codecs.powersgd": {"naming_failed_ranks"},
    "moe_ext.compression.reducer": {"naming_failed_ranks"},
    "moe_ext.dispatch.gpu_libraries": {"naming_failed_ranks"},
    "moe_ext.dispatch.rows": {"name_failed_ranks"},
    "moe_ext.distributed": {"naming_failed_ranks"},
    "moe_ext.distributed.checkpoint": {"naming_failed_ranks"},
    "moe_ext.distributed.dtensor": {"naming_failed_ranks"},
    "moe_ext.distributed.placement": {"naming_failed_ranks"},
    "moe_ext.distributed.replicas": {"share"},
    "moe_ext.integrations.grace": {"naming_failed_ranks"},
    # Code of the user runs between two exchanges.
    "moe_ext.dispatch.base": {"check_equal_over_ranks", "is_told", "share", "telling"},
    "moe_ext.dispatch.static_sizes": {"is_told", "mark_told"},
    "moe_ext.pipeline.executor": {"telling"},
    "moe_ext.pipeline.step": {"telling"},
    # A rank may have been called alone.
    "moe_ext.distributed.state_dict": {"meet"},
}
# Modules that give an `Agreement` a problem, and the reason why they do not raise it inside.
GIVES_PROBLEMS = {
    "moe_ext.compression.buckets": "the caller has found it before",
    "moe_ext.compression.collectives.arguments": "a text of several checks in a row",
    "moe_ext.compression.collectives.exact": "as `arguments`, with other facts",
    "moe_ext.compression.collectives.sparse": "as `arguments`, with other facts",
    "moe_ext.compression.gradients": "of several problems the last one is told",
    "moe_ext.dispatch.counts": "the counts have told that there is one",
    "moe_ext.dispatch.gpu_libraries": "the text is that of what looked for the library",
    "moe_ext.dispatch.static_sizes": "the error of this rank says more than that of the others",
    "moe_ext.distributed.checkpoint": "ranks that are gone are not told over their own group",
    "moe_ext.integrations.huggingface.expert_parallel": "it is told to several groups",
    "moe_ext.optim.local_steps": "a manager of torchft is told by NaN",
}
# A name that users import, of a module that has moved up.
ALIASES = {"moe_ext.compression.grace"}


@functools.cache
def sources():
    """Module name to syntax tree."""
    found = {}
    for path in sorted((ROOT / "moe_ext").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def package(module):
    """The folder right under moe_ext; "" for the modules beside the folders."""
    parts = module.split(".")
    is_folder = len(parts) > 2 or any(m.startswith(module + ".") for m in sources())
    return parts[1] if len(parts) > 1 and is_folder else ""


def is_for_types(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(body, *, inside_functions):
    """The statements that an import runs, or all of them."""
    for node in body:
        yield node
        if is_for_types(node):
            yield from statements(node.orelse, inside_functions=inside_functions)
            continue
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and not inside_functions:
            continue
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                yield from statements(inner, inside_functions=inside_functions)


def imports(module, *, inside_functions):
    """(imported module of moe_ext, name taken from it or "")."""
    for node in statements(sources()[module].body, inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in sources():
                    yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moe_ext"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full, "") if full in sources() else (node.module, alias.name)


def floor_of(module):
    return next(i for i, names in enumerate(FLOORS) if package(module) in names)


def test_packages_use_those_below_them():
    wrong = [
        f"{module} imports {target}"
        for module in sources()
        if module not in TOP | ALIASES
        for target, _ in imports(module, inside_functions=True)
        if target in TOP - {"moe_ext"} or floor_of(target) > floor_of(module)
    ]
    assert wrong == []


def test_no_circles():
    edges = {
        module: {target for target, _ in imports(module, inside_functions=True)} - {module}
        for module in sources()
    }
    done = set()

    def follow(module, path):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for target in sorted(edges[module]):
            follow(target, [*path, module])
        done.add(module)

    for module in edges:
        follow(module, [])


def test_bytes_of_tensors_are_made_in_one_place():
    # A tensor of one element a row, or of none, may have strides that torch views in no other
    # dtype. The oracles of the tests are written without the package.
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in sources().items()
        if module != "moe_ext._bytes" and package(module) != "reference"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "view"
        and [ast.unparse(each) for each in node.args] == ["torch.uint8"]
    ]
    assert wrong == [], "moe_ext._bytes.as_bytes"


def test_no_private_names_of_other_packages():
    wrong = [
        f"{module} imports {target}{'.' * bool(name)}{name}"
        for module in sources()
        if module not in TOP
        for target, name in imports(module, inside_functions=True)
        if package(target) not in ("", package(module))
        and any(part.startswith("_") for part in [*target.split(".")[2:], name])
    ]
    assert wrong == []


def calls_c10d(tree):
    """What a module takes from torch.distributed besides types."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                a.name for a in node.names if a.name.split(".")[:2] == ["torch", "distributed"]
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            found |= {f"torch.{a.name}" for a in node.names if a.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module in (
            "torch.distributed",
            "torch.distributed.distributed_c10d",
            "torch.distributed._functional_collectives",
        ):
            found |= {a.name for a in node.names} - C10D_TYPES
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.distributed":
            found |= {node.attr} - C10D_TYPES
    return found


def test_who_calls_c10d():
    found = {
        module: calls_c10d(tree)
        for module, tree in sources().items()
        if package(module) != "comm" and module not in TOP and calls_c10d(tree)
    }
    assert found == BESIDE_COMM


@pytest.mark.parametrize(
    "text, found",
    [
        ("import torch.distributed as dist", {"torch.distributed"}),
        ("from torch import distributed", {"torch.distributed"}),
        ("from torch.distributed import ProcessGroup, all_reduce", {"all_reduce"}),
        ("from torch.distributed.device_mesh import DeviceMesh", set()),
        (
            "def f(x: 'torch.distributed.ProcessGroup'): torch.distributed.all_reduce(x)",
            {"all_reduce"},
        ),
    ],
)
def test_the_rule_for_c10d_sees_what_it_should(text, found):
    assert calls_c10d(ast.parse(text)) == found


# Drop-in classes have the names of the libraries that they stand for.
NAMES_OF_OTHERS = {
    *("Compressor", "GShardGate", "MOELayer", "MoELayer", "NaiveGate", "SwitchGate"),
}


def test_one_object_tells_what_ranks_differ_in():
    tells, gives = {}, set()
    for module, tree in sources().items():
        if package(module) in ("comm", "") and module != "moe_ext":
            continue
        for target, name in imports(module, inside_functions=True):
            if target in (
                "moe_ext.comm.agreement",
                "moe_ext.comm.failures",
                "moe_ext.comm.reports",
            ):
                assert name, f"{module} imports {target}, and not what it takes from there"
                if name in TELLS:
                    tells.setdefault(module, set()).add(name)
        for node in ast.walk(tree):
            called = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
            if called == "compare" and any(given.arg == "problem" for given in node.keywords):
                gives.add(module)
    assert tells == BESIDE_AGREEMENT
    assert gives == set(GIVES_PROBLEMS)


def test_a_name_of_a_class_stands_once():
    places = {}
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in NAMES_OF_OTHERS} == {}
    for name in NAMES_OF_OTHERS:
        assert sum(not module.startswith("moe_ext.integrations.") for module in twice[name]) <= 1


# A sentence that begins so has no subject that one can point at.
_RIDDLE = re.compile(r'^ *("""|//|#) ?(What|Whether|Where|Which|Of|How|Those|That) .*')


def riddles(text):
    return [line.strip() for line in text.splitlines() if _RIDDLE.match(line)]


def test_no_class_has_more_than_25_methods():
    classes = (n for t in sources().values() for n in ast.walk(t) if isinstance(n, ast.ClassDef))
    sizes = {c.name: sum(isinstance(n, ast.FunctionDef) for n in c.body) for c in classes}
    assert {name: size for name, size in sizes.items() if size > 25} == {}


def test_comments_and_docstrings_name_their_subject():
    found = {}
    for folder, ends in (("moe_ext", ("*.py",)), ("csrc", ("*.h", "*.cpp", "*.cu", "*.cuh"))):
        for end in ends:
            for path in (ROOT / folder).rglob(end):
                if lines := riddles(path.read_text()):
                    found[str(path.relative_to(ROOT))] = lines
    assert not found, found
    assert riddles('    """Whether it is so."""\n# Of a pass\n// What is left') and not riddles(
        "# Ok"
    )
