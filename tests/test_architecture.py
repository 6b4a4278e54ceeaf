"""The shape of the package: which folder may use which, who talks to c10d, and how docstrings read.

Floors from the ground up; a module imports from its own floor and from those below it.
`make lint` runs this file alone, without the package.
"""

import ast
import collections
import functools
import re
from pathlib import Path

import pytest
from test_words import prose, to_mend

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
    "moe_ext.attention.sharding": {"SummedOptions", "telling"},
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
    # The others wait in a sum.
    "moe_ext.attention.huggingface.packing": {"telling"},
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
# Files that are not replaced in one step: optimizer files of the Trainer, one of each rank, and
# bytes in memory that Horovod's facade sends.
WRITTEN_IN_PLACE = {"moe_ext.integrations.huggingface.trainer", "moe_ext.integrations.horovod"}
WRITERS = ("write_text", "write_bytes", "savefig", "save_file", "save")


@functools.cache
def sources():
    """Module name to syntax tree."""
    found = {}
    for path in sorted((ROOT / "moe_ext").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


@functools.cache
def nodes():
    """(module, node) of all syntax trees."""
    return [(module, node) for module, tree in sources().items() for node in ast.walk(tree)]


@functools.cache
def package(module):
    """The folder right under moe_ext; "" for the modules beside the folders."""
    parts = module.split(".")
    is_folder = len(parts) > 2 or any(m.startswith(module + ".") for m in sources())
    return parts[1] if len(parts) > 1 and is_folder else ""


def is_for_types(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(body):
    """The statements of a module, but for those that are there for types alone."""
    for node in body:
        yield node
        fields = ("orelse",) if is_for_types(node) else ("body", "orelse", "finalbody", "handlers")
        for field in fields:
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                yield from statements(inner)


@functools.cache
def imports(module):
    """(imported module of moe_ext, name taken from it or "")."""
    found = []
    for node in statements(sources()[module].body):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name in sources()]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moe_ext"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.append((full, "") if full in sources() else (node.module, alias.name))
    return found


def floor_of(module):
    return next(i for i, names in enumerate(FLOORS) if package(module) in names)


def test_packages_use_those_below_them():
    wrong = [
        f"{module} imports {target}"
        for module in sources()
        if module not in TOP | ALIASES
        for target, _ in imports(module)
        if target in TOP - {"moe_ext"} or floor_of(target) > floor_of(module)
    ]
    assert wrong == []


def test_no_circles():
    edges = {module: {target for target, _ in imports(module)} - {module} for module in sources()}
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
        for module, node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and module != "moe_ext._bytes"
        and package(module) != "reference"
        and node.func.attr == "view"
        and [ast.unparse(each) for each in node.args] == ["torch.uint8"]
    ]
    assert wrong == [], "moe_ext._bytes.as_bytes"


def test_no_private_names_of_other_packages():
    wrong = [
        f"{module} imports {target}{'.' * bool(name)}{name}"
        for module in sources()
        if module not in TOP
        for target, name in imports(module)
        if package(target) not in ("", package(module))
        and any(part.startswith("_") for part in [*target.split(".")[2:], name])
    ]
    assert wrong == []


def takes_from_c10d(node):
    """Names of torch.distributed that a node takes, besides types."""
    if isinstance(node, ast.Import):
        return {a.name for a in node.names if a.name.split(".")[:2] == ["torch", "distributed"]}
    if isinstance(node, ast.ImportFrom) and node.module == "torch":
        return {f"torch.{a.name}" for a in node.names if a.name == "distributed"}
    if isinstance(node, ast.ImportFrom) and node.module in (
        "torch.distributed",
        "torch.distributed.distributed_c10d",
        "torch.distributed._functional_collectives",
    ):
        return {a.name for a in node.names} - C10D_TYPES
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.distributed":
        return {node.attr} - C10D_TYPES
    return set()


def test_who_calls_c10d():
    found = collections.defaultdict(set)
    for module, node in nodes():
        if package(module) != "comm" and module not in TOP and (taken := takes_from_c10d(node)):
            found[module] |= taken
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
    assert set().union(*map(takes_from_c10d, ast.walk(ast.parse(text)))) == found


def writes(node):
    """True for a call that writes to a file."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    if last == "open":
        return any(isinstance(arg, ast.Constant) and "w" in str(arg.value) for arg in node.args)
    return last in WRITERS and (last != "save" or name == "torch.save")


def replaced(node):
    return isinstance(node, ast.With) and any(
        ast.unparse(item.context_expr).startswith("replacing(") for item in node.items
    )


def unsafe_writes(nodes):
    """Lines that write to a file outside of `with replacing(...)`, by module."""
    safe = {id(n) for _, w in nodes if replaced(w) for n in ast.walk(w)}
    found = collections.defaultdict(list)
    for module, node in nodes:
        if writes(node) and id(node) not in safe:
            found[module].append(node.lineno)
    return found


def test_every_file_is_replaced_in_one_step():
    assert unsafe_writes(nodes()).keys() == WRITTEN_IN_PLACE


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Path(x).write_text('a')", [1]),
        ("with open(x, 'w') as f: f.write('a')", [1]),
        ("with replacing(x) as f:\n f.write_bytes(b'a')\nf.savefig(x)", [3]),
        ("with replacing(x) as p, p.open('w') as f: f.write('a')", []),
        ("open(x)\ntorch.save(a, x)\nlayer.save(x)", [2]),
    ],
)
def test_the_rule_for_files_sees_what_it_should(text, lines):
    assert unsafe_writes([("", node) for node in ast.walk(ast.parse(text))])[""] == lines


def test_what_a_generator_draws_lies_on_a_device_that_is_named():
    """The host's generator draws nothing on another default device of torch."""
    draws = {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm")}
    found = [
        f"{module}:{node.lineno}"
        for module, node in nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func) in draws
        if {keyword.arg for keyword in node.keywords} >= {"generator"}
        if "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not found


# Drop-in classes have the names of the libraries that they stand for.
NAMES_OF_OTHERS = {
    *("Compressor", "GShardGate", "MOELayer", "MoELayer", "NaiveGate", "SwitchGate"),
}


def test_one_object_tells_what_ranks_differ_in():
    above = {m for m in sources() if package(m) not in ("comm", "") or m == "moe_ext"}
    tells = {}
    for module in above:
        for target, name in imports(module):
            if target in [f"moe_ext.comm.{each}" for each in ("agreement", "failures", "reports")]:
                assert name, f"{module} imports {target}, and not what it takes from there"
                if name in TELLS:
                    tells.setdefault(module, set()).add(name)
    assert tells == BESIDE_AGREEMENT
    assert set(GIVES_PROBLEMS) == {
        module
        for module, node in nodes()
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "compare"
        and module in above
        and any(given.arg == "problem" for given in node.keywords)
    }


def test_a_name_of_a_class_stands_once():
    places = collections.defaultdict(list)
    for module, node in nodes():
        if isinstance(node, ast.ClassDef):
            places[node.name].append(module)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in NAMES_OF_OTHERS} == {}
    for name in NAMES_OF_OTHERS:
        assert sum(not module.startswith("moe_ext.integrations.") for module in twice[name]) <= 1


# A sentence that begins so has no subject that one can point at.
_RIDDLE = re.compile(
    r'^ *("""|//|#) ?(What|Whether|Where|Which|Of|How|Those|That|It|Its|They|Their|Them|Others'
    r"|Such|And) .*"
)


def riddles(text):
    return [line.strip() for line in text.splitlines() if _RIDDLE.match(line)]


def test_no_class_has_more_than_25_methods():
    classes = (node for _, node in nodes() if isinstance(node, ast.ClassDef))
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
    assert riddles('    """Whether it is so."""\n# Its place\n// What is left') and not riddles(
        "# Ok"
    )


def docstrings():
    """(place, text) of each docstring of a public class, function or method."""
    for module, tree in sources().items():
        todo = [] if module.rpartition(".")[2].startswith("_") else list(tree.body)
        for node in todo:
            named = isinstance(node, ast.ClassDef | ast.FunctionDef)
            if named and not node.name.startswith("_"):
                todo += node.body if isinstance(node, ast.ClassDef) else []
                if text := ast.get_docstring(node):
                    yield f"{module}: {node.name}", text


def test_sentences_of_docstrings_are_short_and_name_their_subject():
    found = [(name, s) for name, text in docstrings() for s in to_mend(prose(text))]
    assert not found, (len(found), found)
