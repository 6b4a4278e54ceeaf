"""Build of moe_ext: setuptools drives CMake, and CMake owns the source list.

Environment: MOE_EXT_CUDA=1 builds the CUDA operators and 0 leaves them out; by default they are
built where torch has CUDA and nvcc is found. TORCH_CUDA_ARCH_LIST names their architectures
(8.0;9.0;10.0+PTX), and with MOE_EXT_CUDA_CHECKS=1 the kernels trap an index that is out of range.
MOE_EXT_TESTS=1 also builds the GoogleTest binaries, MAX_JOBS bounds the compile jobs, DEBUG=1
builds without optimisation.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = "8.0;9.0;10.0+PTX"


class CMakeExtension(Extension):
    """An extension whose sources are listed in CMake, not here."""

    def __init__(self, name):
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Configures and builds with CMake and Ninja, then installs the libraries into the package."""

    def get_ext_filename(self, fullname):
        """Without an interpreter's tag: torch.ops.load_library wants no Python ABI."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extensions(self):
        """Builds everything in one go, and drops what a former build with CUDA left behind."""
        build()
        if not wants_cuda():
            (ROOT / "moe_ext" / "_C_cuda.so").unlink(missing_ok=True)
        super().build_extensions()

    def build_extension(self, ext):
        """Puts one of the libraries into the package."""
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replace, never overwrite: a process that has the old library mapped keeps it.
        staged = target.with_suffix(".so.new")
        shutil.copy2(build_dir() / "csrc" / target.name, staged)
        os.replace(staged, target)


class AnyPythonWheel(bdist_wheel):
    """The operators use torch's stable ABI and no Python ABI: one wheel serves every Python."""

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


def build_dir():
    """Where CMake builds for this torch."""
    import torch

    return ROOT / "build" / f"cmake-{torch.__version__}"


def build():
    """Configures and builds the libraries, and the GoogleTest binaries where MOE_EXT_TESTS=1."""
    import torch

    build_dir().mkdir(parents=True, exist_ok=True)
    cuda = wants_cuda()
    options = {
        "CMAKE_BUILD_TYPE": "Debug" if os.environ.get("DEBUG") == "1" else "Release",
        "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "MOE_EXT_TESTS": on_off(os.environ.get("MOE_EXT_TESTS") == "1"),
        "MOE_EXT_CUDA": on_off(cuda),
        "MOE_EXT_CUDA_CHECKS": on_off(os.environ.get("MOE_EXT_CUDA_CHECKS") == "1"),
    }
    if cuda:
        options["MOE_EXT_CUDA_ARCHS"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS
    if shutil.which("ccache"):
        options["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
        options["CMAKE_CUDA_COMPILER_LAUNCHER"] = "ccache"
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


setup(
    ext_modules=[
        CMakeExtension(f"moe_ext.{name}") for name in ("_C", *(["_C_cuda"] if wants_cuda() else []))
    ],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
