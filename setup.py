"""Build of moe_ext: setuptools drives CMake, and CMake owns the source list.

It is built against the torch that is installed, in an isolated build (plain `pip install`) too.

Environment: MOE_EXT_CUDA=1 builds the CUDA operators and 0 leaves them out; by default they are
built where torch has CUDA and nvcc is found. TORCH_CUDA_ARCH_LIST names their architectures
(8.0;9.0;10.0+PTX), and with MOE_EXT_CUDA_CHECKS=1 the kernels trap an index that is out of range.
MOE_EXT_RUNTIME=1 builds `_runtime`, for this torch and this Python, and 0 leaves it out; by default
it is built where Python's headers are installed.
MOE_EXT_TESTS=1 also builds the GoogleTest binaries, MOE_EXT_WERROR=1 ends the build at a warning,
MAX_JOBS bounds the compile jobs, DEBUG=1 builds without optimisation.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, build_meta, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = "8.0;9.0;10.0+PTX"
TORCH = "torch>=2.11"


def __getattr__(name):
    """The hooks of a build backend (PEP 517) are those of setuptools, but for one."""
    return getattr(build_meta, name)


def get_requires_for_build_wheel(config_settings=None):
    """Torch is fetched into an isolated build only where none is installed."""
    return [] if find_torch() else [TORCH]


get_requires_for_build_editable = get_requires_for_build_wheel


def find_torch():
    """True if torch can be imported, if need be from behind the walls of an isolated build.

    pip isolates a build by PYTHONPATH and runs it with the Python that it installs for.
    """
    if importlib.util.find_spec("torch") is None:
        command = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
        walls = ("PYTHONPATH", "PYTHONNOUSERSITE")
        outside = {name: value for name, value in os.environ.items() if name not in walls}
        listed = subprocess.run(command, env=outside, check=True, capture_output=True, text=True)
        sys.path += [path for path in listed.stdout.splitlines() if path not in sys.path]
    return importlib.util.find_spec("torch") is not None


class CMakeExtension(Extension):
    """An extension whose sources are listed in CMake, not here."""

    def __init__(self, name):
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Configures and builds with CMake and Ninja, then installs the libraries into the package."""

    def get_ext_filename(self, fullname):
        """Without an interpreter's tag: torch.ops.load_library wants no Python ABI.

        But for `_runtime`, whose name says which torch and which Python may load it.
        """
        *folders, name = fullname.split(".")
        return str(Path(*folders, file_name(name)))

    def build_extensions(self):
        """Builds everything in one go, and drops what only a former build had."""
        build()
        wanted = [file_name(name) for name in libraries()]
        folder = (ROOT if self.inplace else Path(self.build_lib)) / "moe_ext"
        for former in [*folder.glob("_C_cuda.so"), *folder.glob("_runtime.*")]:
            if former.name not in wanted:
                former.unlink()
        super().build_extensions()

    def build_extension(self, ext):
        """Puts one of the libraries into the package."""
        put(ext.name.rpartition(".")[2], Path(self.get_ext_fullpath(ext.name)).resolve())


class AnyPythonWheel(bdist_wheel):
    """The operators use torch's stable ABI and no Python ABI: one wheel serves every Python.

    Another Python or torch than that of the build does without `_runtime`.
    """

    def get_tag(self):
        """The platform's tag alone."""
        return "py3", "none", super().get_tag()[2]


def on_off(value):
    """CMake's word for a truth value."""
    return "ON" if value else "OFF"


def wants_cuda():
    """Whether to build the CUDA operators: as MOE_EXT_CUDA says, else where that can be done."""
    import torch

    asked = os.environ.get("MOE_EXT_CUDA", "")
    if asked not in ("", "0", "1"):
        raise RuntimeError(f"setup.py: expected MOE_EXT_CUDA to be 0 or 1, got {asked}")
    nvcc = shutil.which("nvcc") or os.environ.get("CUDACXX")
    if asked == "1" and not nvcc:
        raise RuntimeError("setup.py: expected nvcc to be on PATH with MOE_EXT_CUDA=1, got none")
    if asked:
        return asked == "1"
    if torch.version.cuda and not nvcc:
        print("setup.py: no nvcc on PATH: building without the CUDA operators", file=sys.stderr)
    return bool(torch.version.cuda and nvcc)


def libraries():
    """Names of the libraries that are built here; an sdist and metadata are made without torch."""
    optional = OPTIONAL if find_torch() else {}
    return ["_C", *(name for name, wanted in optional.items() if wanted())]


def file_name(name):
    """The file of a library in the package."""
    return runtime_name() if name == "_runtime" else f"{name}.so"


def put(name, target):
    """Copies a library that was built; a process that has the old file mapped keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_suffix(".so.new")
    shutil.copy2(build_dir() / "csrc" / f"{name}.so", staged)
    os.replace(staged, target)


def build_in_place():
    """Builds without setuptools, whose version may not read pyproject.toml, as an install does."""
    build()
    for name in libraries():
        put(name, ROOT / "moe_ext" / file_name(name))


def runtime_name():
    """The file of `_runtime`: moe_ext/_runtime_library.py looks for the same name."""
    import torch

    return f"_runtime.torch-{torch.__version__}{sysconfig.get_config_var('EXT_SUFFIX')}"


def wants_runtime():
    """Whether to build `_runtime`: as MOE_EXT_RUNTIME says, else where that can be done."""
    import torch

    asked = os.environ.get("MOE_EXT_RUNTIME", "")
    if asked not in ("", "0", "1"):
        raise RuntimeError(f"setup.py: expected MOE_EXT_RUNTIME to be 0 or 1, got {asked}")
    lacking = None
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        lacking = "Python.h (Debian's python3-dev)"
    elif not torch.distributed.is_available():
        lacking = "torch.distributed"
    if asked == "1" and lacking:
        raise RuntimeError(f"setup.py: expected {lacking} to be there with MOE_EXT_RUNTIME=1")
    if asked != "0" and lacking:
        print(f"setup.py: no {lacking}: building without moe_ext._runtime", file=sys.stderr)
    return asked != "0" and not lacking


def build_dir():
    """Where CMake builds for this torch."""
    import torch

    return ROOT / "build" / f"cmake-{torch.__version__}"


def build():
    """Configures and builds the libraries, and the GoogleTest binaries where MOE_EXT_TESTS=1."""
    import torch

    if [int(number) for number in torch.__version__.split(".")[:2]] < [2, 11]:
        raise RuntimeError(f"setup.py: expected torch 2.11 or later, got {torch.__version__}")
    build_dir().mkdir(parents=True, exist_ok=True)
    cuda = wants_cuda()
    options = {
        "CMAKE_BUILD_TYPE": "Debug" if os.environ.get("DEBUG") == "1" else "Release",
        "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "MOE_EXT_TESTS": on_off(os.environ.get("MOE_EXT_TESTS") == "1"),
        "MOE_EXT_WERROR": on_off(os.environ.get("MOE_EXT_WERROR") == "1"),
        "MOE_EXT_CUDA": on_off(cuda),
        "MOE_EXT_RUNTIME": on_off(wants_runtime()),
        "MOE_EXT_PYTHON_INCLUDE": sysconfig.get_path("include"),
        "MOE_EXT_TORCH_VERSION": torch.__version__,
        "MOE_EXT_CUDA_CHECKS": on_off(os.environ.get("MOE_EXT_CUDA_CHECKS") == "1"),
    }
    if cuda:
        options["MOE_EXT_CUDA_ARCHS"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS
    if shutil.which("ccache"):
        for name in ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER"):
            options[name] = os.environ.get(name, "ccache")
    cmake = find_tool("cmake")
    options["CMAKE_MAKE_PROGRAM"] = find_tool("ninja")
    flags = [f"-D{key}={value}" for key, value in options.items()]
    subprocess.check_call([cmake, "-S", ROOT, "-B", build_dir(), "-G", "Ninja", *flags])
    jobs = os.environ.get("MAX_JOBS") or str(min(4, os.cpu_count() or 1))
    subprocess.check_call([cmake, "--build", build_dir(), "-j", jobs])


def find_tool(name):
    """Returns the path of a build tool: beside this Python first, then on PATH."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        raise RuntimeError(
            f"setup.py: expected {name} to be installed, got none; try `pip install {name}`"
        )
    return path


OPTIONAL = {"_C_cuda": wants_cuda, "_runtime": wants_runtime}


def main():
    """Runs setuptools."""
    setup(
        ext_modules=[CMakeExtension(f"moe_ext.{name}") for name in libraries()],
        cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
    )


if __name__ == "__main__":
    main()
