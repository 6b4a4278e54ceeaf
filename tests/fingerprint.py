"""What a process's frameworks consist of, to see whether something was replaced since.

`Fingerprint` holds every module of the given packages, and what can be reached from these: classes,
functions with their closures, and tables of functions. It keeps the objects themselves, so that
`changes` needs no second walk: it reads the same owners again, and compares by identity.
"""

import atexit
import collections
import copyreg
import functools
import gc
import signal
import sys
import threading
import types
import warnings

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools.partial)
TABLES = (dict, list, set, collections.deque, types.MappingProxyType)
# Objects that a module or a class holds, and what these hold in turn.
DEPTH = 4
# C++ keeps tables of its own, one for each of these.
KEYS = ("CPU", "CUDA", "Autograd", "AutogradCPU", "CompositeImplicitAutograd", "Meta", "Python")


def is_part(value):
    """True for what makes up a framework's code: functions, classes, and what can be called."""
    return isinstance(value, (*FUNCTIONS, *WRAPPERS, type)) or callable(value)


def origin(value):
    """Package that a function, a class or an object is of; operators have that of their name."""
    value = getattr(value, "func", value) if isinstance(value, functools.partial) else value
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(value).partition(".")[0]
    if not isinstance(value, (type, *FUNCTIONS)):
        value = type(value)
    return str(getattr(value, "__module__", "")).partition(".")[0]


class Fingerprint:
    """All that can be reached from the modules of some packages now."""

    def __init__(self, packages):
        self.packages = packages
        # Id of an owner to its name, itself, and what it held by the name there.
        self.owners = {}
        # Looking at what is deprecated warns.
        warnings.simplefilter("ignore", FutureWarning)
        modules = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] in packages]
        for module in modules:
            self._visit(module.__name__, module, DEPTH)
        # Functions inside others, which no attribute leads to.
        for value in gc.get_objects():
            if isinstance(value, types.FunctionType) and origin(value) in packages:
                self._visit(f"{value.__module__}.{value.__qualname__}", value, 1)
        self.process = process_wide()

    def _visit(self, name, owner, depth):
        if id(owner) in self.owners or depth == 0:
            return
        found = parts_of(owner, self.packages)
        if found is None:
            return
        self.owners[id(owner)] = (name, owner, found)
        for key, value in found.items():
            if not isinstance(value, types.ModuleType):
                # Classes and functions are few; objects hold objects without an end.
                is_code = isinstance(value, (type, *FUNCTIONS, *WRAPPERS))
                self._visit(f"{name}.{key}", value, DEPTH if is_code else depth - 1)

    def changes(self):
        """Names of what is another object now, and of hooks and methods that were added."""
        found = []
        for name, owner, before in self.owners.values():
            now = parts_of(owner, self.packages) or {}
            found += [
                f"{name}.{key} is another one"
                for key, value in before.items()
                if key in now and now[key] is not value and not _is_list_of_data(key, value)
            ]
            found += [f"{name}.{key} is gone" for key in before if key not in now]
            added = [key for key in now if key not in before]
            # Names that a lazy module has looked up, and entries of caches, are not.
            is_open = isinstance(owner, types.ModuleType) or (
                isinstance(owner, (*TABLES, types.SimpleNamespace)) and "hook" not in name.lower()
            )
            found += [
                f"{name}.{key} was added"
                for key in added
                if not is_open or origin(now[key]) not in self.packages or _is_ours(key)
            ]
        now = process_wide()
        found += [f"{k}: {v} was, {now[k]} is" for k, v in self.process.items() if now[k] != v]
        return sorted(set(found))


def _is_ours(key):
    return "moe_ext" in str(key)


def _is_list_of_data(name, value):
    return isinstance(value, TABLES) and "hook" not in name.lower()


def parts_of(owner, packages):
    """Name to part of a module, class, function, table or object; None for what has no parts."""
    if isinstance(owner, types.ModuleType):
        held = {k: v for k, v in vars(owner).items() if k != "__warningregistry__"}
    elif isinstance(owner, type):
        if origin(owner) not in packages:
            return None
        # Python sets the last ones when they are asked for.
        passing = ("__dict__", "__weakref__", "__annotations__", "__slotnames__")
        held = {k: v for k, v in vars(owner).items() if k not in passing and k[:4] != "_abc"}
        held |= {f"__bases__[{i}]": base for i, base in enumerate(owner.__bases__)}
    elif isinstance(owner, types.FunctionType):
        return _parts_of_function(owner)
    elif isinstance(owner, types.MethodType):
        return {"__func__": owner.__func__}
    elif isinstance(owner, property):
        return {"fget": owner.fget, "fset": owner.fset, "fdel": owner.fdel}
    elif isinstance(owner, (staticmethod, classmethod)):
        return {"__func__": owner.__func__}
    elif isinstance(owner, (functools.cached_property, functools.partial)):
        return {"func": owner.func}
    elif isinstance(owner, TABLES):
        return _parts_of_table(owner)
    elif origin(owner) in packages and not isinstance(
        owner, (torch.Tensor, torch._ops._OpNamespace)
    ):
        held = getattr(owner, "__dict__", {})
        if not isinstance(held, dict):
            return None
    else:
        return None
    return {
        k: v
        for k, v in list(held.items())
        if is_part(v) or isinstance(v, TABLES) or origin(v) in packages
    }


def _parts_of_function(function):
    found = {"__code__": function.__code__}
    found |= {f"__defaults__[{i}]": v for i, v in enumerate(function.__defaults__ or ())}
    found |= {f"__kwdefaults__[{k}]": v for k, v in (function.__kwdefaults__ or {}).items()}
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            found[f"<{name}>"] = cell.cell_contents
        except ValueError:  # empty
            continue
    found |= vars(function)
    return {k: v for k, v in found.items() if is_part(v) or isinstance(v, types.CodeType)}


def _parts_of_table(table):
    # By the methods of the built-in classes: those of a lazy table import what it names.
    if isinstance(table, dict):
        items = list(dict.items(table))
    elif isinstance(table, types.MappingProxyType):
        items = list(table.items())
    else:
        values = next(kind.__iter__ for kind in TABLES if isinstance(table, kind))(table)
        items = [(v, v) for v in list(values)]
    is_set = not isinstance(table, (dict, types.MappingProxyType))
    return {
        f"[{_text(key)}{f' at {id(value):x}' if is_set else ''}]": value
        for key, value in items
        # Entries of pytree's tables are named tuples of functions.
        if is_part(value) or (isinstance(value, tuple) and any(map(is_part, value)))
    }


def _text(key):
    if isinstance(key, (str, int, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(key)
    if not isinstance(key, (type, *FUNCTIONS)):
        return f"{type(key).__name__} at {id(key):x}"
    return f"{key.__module__}.{getattr(key, '__qualname__', type(key).__name__)}"


def process_wide():
    """State of the whole process, by name."""
    return {
        "atexit": atexit._ncallbacks(),
        "gc.callbacks": list(map(id, gc.callbacks)),
        "sys.meta_path": [*map(id, sys.meta_path)],
        "sys.path_hooks": [*map(id, sys.path_hooks)],
        "sys.excepthook": id(sys.excepthook),
        "sys.gettrace": id(sys.gettrace()),
        "sys.getprofile": id(sys.getprofile()),
        "sys.unraisablehook": id(sys.unraisablehook),
        "threading.excepthook": id(threading.excepthook),
        "warnings.showwarning": id(warnings.showwarning),
        "signals": {s.name: id(signal.getsignal(s)) for s in signal.Signals},
        "copyreg": {_text(k): id(v) for k, v in copyreg.dispatch_table.items()},
        "modes of torch": len(_get_current_dispatch_mode_stack()),
        "modes of functions": torch._C._len_torch_function_stack(),
        "default dtype": torch.get_default_dtype(),
        **{f"C++ operators for {key}": _registrations(key) for key in KEYS},
    }


def _registrations(key):
    """Operators that have a kernel, but for those of our own."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return len([name for name in found if not name.startswith("moe_ext::")])
