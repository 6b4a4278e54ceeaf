"""Build of moe_ext: setuptools drives CMake, and CMake owns the source list.

Environment: MOE_EXT_TESTS=1 also builds the GoogleTest binaries, MAX_JOBS bounds the compile jobs,
DEBUG=1 builds without optimisation.
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


class CMakeExtension(Extension):
    """An extension whose sources are listed in CMake, not here."""

    def __init__(self, name):
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Configures and builds with CMake and Ninja, then installs the libraries into the package."""

    def get_ext_filename(self, fullname):
        """Without an interpreter's tag: torch.ops.load_library wants no Python ABI."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext):
        """Builds the library, and the GoogleTest binaries where MOE_EXT_TESTS=1."""
        import torch

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = ROOT / "build" / f"cmake-{torch.__version__}"
        build_dir.mkdir(parents=True, exist_ok=True)
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if os.environ.get("DEBUG") == "1" else "Release",
            "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
            "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
            "MOE_EXT_TESTS": "ON" if os.environ.get("MOE_EXT_TESTS") == "1" else "OFF",
        }
        if shutil.which("ccache"):
            options["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
        cmake = find_tool("cmake")
        ninja = find_tool("ninja")
        options["CMAKE_MAKE_PROGRAM"] = ninja
        flags = [f"-D{key}={value}" for key, value in options.items()]
        subprocess.check_call([cmake, "-S", ROOT, "-B", build_dir, "-G", "Ninja", *flags])
        jobs = os.environ.get("MAX_JOBS") or str(min(4, os.cpu_count() or 1))
        subprocess.check_call([cmake, "--build", build_dir, "-j", jobs])
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replace, never overwrite: a process that has the old library mapped keeps it.
        staged = target.with_suffix(".so.new")
        shutil.copy2(build_dir / "csrc" / target.name, staged)
        os.replace(staged, target)


class AnyPythonWheel(bdist_wheel):
    """The operators use torch's stable ABI and no Python ABI: one wheel serves every Python."""

    def get_tag(self):
        """The platform's tag alone."""
        return "py3", "none", super().get_tag()[2]


def find_tool(name):
    """Returns the path of a build tool: beside this Python first, then on PATH."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        raise RuntimeError(
            f"setup.py: expected {name} to be installed, got none; try `pip install {name}`"
        )
    return path


setup(
    ext_modules=[CMakeExtension("moe_ext._C")],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
