"""A new user's first hour: the sdist, the README's lines, a bare machine, and mistakes."""

import inspect
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from forked import Script

from moe_ext import MoELayer, _library, compression, distributed, nn
from moe_ext.nn.options import ELSEWHERE
from moe_ext.testing import spawn_ranks

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = ROOT / "build" / f"cmake-{torch.__version__}"
FULL = os.environ.get("MOE_EXT_FULL") == "1"
TRAIN = """
import moe_ext, torch
layer = moe_ext.MoELayer(8, 8, 4)
layer(torch.randn(5, 8)).sum().backward()
print(moe_ext.__file__)
"""


def run(command, folder, environment, **kwargs):
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, **kwargs
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def bare_environment(**more):
    """Of a shell that knows nothing of this repository."""
    ours = ("PYTHON", "MOE_EXT_", "VIRTUAL_ENV", "CMAKE_", "CCACHE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


@pytest.fixture(scope="module")
def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git clone")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def unpacked(tracked, tmp_path_factory):
    """The sdist of a clone, unpacked; the tree's own egg-info would add what was there once."""
    clone, folder = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("sdist")
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    log = clone.parent / "sdist.log"
    assert Script(["-c", build], bare_environment(), log, clone).wait(60) == 0, log.read_text()
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_sdist_is_the_repository(unpacked, tracked):
    files = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    made = {
        name for name in files if name.startswith(("PKG-INFO", "setup.cfg", "moe_ext.egg-info"))
    }
    assert files - made == set(tracked)
    for name in tracked:
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes(), name


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new virtual environment, and a shell in it.

    It stands for a machine where torch is installed and moe_ext is not: the packages of the
    environment under test are lent to it, but for moe_ext.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv, lent = folder / "venv", folder / "lent"
    run([sys.executable, "-m", "venv", "--without-pip", venv], folder, bare_environment())
    (venv / "bin" / "pip").write_text(f'#!/bin/sh\nexec {venv}/bin/python -m pip "$@"\n')
    (venv / "bin" / "pip").chmod(0o755)
    lent.mkdir()
    for package in (path for path in site.getsitepackages() if Path(path).is_dir()):
        for path in Path(package).iterdir():
            if "moe_ext" not in path.name and not (lent / path.name).exists():
                (lent / path.name).symlink_to(path)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(str(lent))
    shell = bare_environment(MOE_EXT_CUDA="0", OMP_NUM_THREADS="1")
    shell["PATH"] = f"{venv / 'bin'}{os.pathsep}{shell['PATH']}"
    if not FULL:
        # Objects of the tree under test, for the same sources.
        shell["CMAKE_CXX_COMPILER_LAUNCHER"] = str(ROOT / "tools" / "reuse_objects.sh")
        shell["REUSED_BUILD"] = str(OBJECTS)
    return venv, shell


@pytest.mark.slow
@pytest.mark.timeout(3600 if FULL else 300)
def test_the_readme_installs_from_the_sdist(unpacked, environment, tmp_path):
    """Objects are those of the tree under test, whose sources are the sdist's: all else is done."""
    if not FULL and not (OBJECTS / "csrc").exists():
        pytest.skip("no in-tree build for this torch to take objects from")
    venv, shell = environment
    readme = (unpacked / "README.md").read_text()
    lines = next(b for b in re.findall(r"```\n(.*?)```", readme, re.DOTALL) if "pip install" in b)
    done = subprocess.run(
        ["bash", "-e", "-x", "-c", lines], cwd=unpacked, env=shell, capture_output=True, text=True
    )
    if "No matching distribution" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    # pip isolates the build, which finds the torch that is installed all the same.
    assert f"torch {torch.__version__}" in re.sub(" +", " ", done.stdout), done.stdout
    assert f"compiled for torch {torch.__version__}" in done.stdout, done.stdout
    python = venv / "bin" / "python"
    assert str(venv) in run([python, "-c", TRAIN], tmp_path, shell)
    # In the repository's own folder, Python finds that one first.
    hidden = subprocess.run(
        [python, "-m", "moe_ext", "info"], cwd=unpacked, env=shell, capture_output=True, text=True
    )
    assert re.search(
        rf"got no file; this folder hides the moe_ext that is installed in {venv}\S*/moe_ext: "
        r"start Python in another folder \(`cd \.\.`\), or build in this one with `make build`",
        hidden.stderr,
    ), hidden.stderr


def test_without_operators_anywhere_the_error_says_how_to_build_them(tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "PATH", tmp_path / "moe_ext" / "_C.so")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ImportError, match="got no file; build them with `pip install --editable "):
        _library.load()


def test_a_machine_without_googletest_builds_the_rest(tmp_path):
    """The tests in C++ are left out, and `make test` asks ctest whether they are."""
    cmake = shutil.which("cmake", path=bare_environment()["PATH"])
    options = {
        "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
        "CMAKE_DISABLE_FIND_PACKAGE_GTest": "ON",
        "MOE_EXT_GTEST_URL": "file:///nothing",
        "MOE_EXT_TESTS": "ON",
    }
    flags = [f"-D{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path, "-G", "Ninja", *flags],
        env=bare_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no GoogleTest: it is not installed" in done.stderr
    listed = run(["ctest", "--test-dir", tmp_path, "-N"], tmp_path, bare_environment())
    assert "Total Tests: 0" in listed
    targets = run(["ninja", "-n"], tmp_path, bare_environment())
    assert "_C_simt.so" in targets and "test_simt" not in targets


def layer(**options):
    return MoELayer(8, 8, **{"num_experts": 4} | options)


@pytest.mark.parametrize("name, ours", ELSEWHERE.items())
def test_arguments_of_other_libraries_are_told_by_our_names(name, ours):
    assert ours in inspect.signature(MoELayer).parameters
    with pytest.raises(TypeError, match=rf"MoELayer: expected .* got {name} \(here {ours}\)$"):
        layer(**{name: 1})


MISTAKES = {
    "a name that is nobody's": (
        lambda: layer(wide=1),
        r"MoELayer: expected arguments to be among model_dim, ffn_dim, .*, dtype, got wide$",
    ),
    "a dtype by its name": (
        lambda: layer(dtype="bfloat16"),
        r"MoELayer: expected dtype to be of type dtype, got 'bfloat16'",
    ),
    "a class for a router": (
        lambda: layer(router=nn.TopKRouter),
        r"MoELayer: expected router to be a name or a module, got the class TopKRouter; make one",
    ),
    "a list of experts": (
        lambda: layer(experts=[torch.nn.Linear(8, 8)] * 4),
        r"MoELayer: expected experts to be one module, got a list of 4; moe_ext.nn.ModuleExperts",
    ),
    "a ModuleList of experts": (
        lambda: layer(experts=torch.nn.ModuleList([torch.nn.Linear(8, 8)] * 4)),
        r"got a ModuleList of 4; moe_ext.nn.ModuleExperts runs modules",
    ),
    "a mesh for a group": (
        lambda: layer(ep_group=distributed.MoEMesh()),
        r"MoELayer: expected ep_group to be None or a ProcessGroup .*; its ep_group is one$",
    ),
    "experts over more ranks than there are": (
        lambda: distributed.MoEMesh(dp=1, ep=2),
        r"MoEMesh: .* the number of ranks, 1, got dp=1, ep=2; "
        r"torch.distributed.init_process_group\(\) has not run$",
    ),
    "parameters for a model": (
        lambda: distributed.sync_gradients(layer().parameters()),
        "sync_gradients: expected model to be of type Module, got <generator",
    ),
    "a codec for a state": (
        lambda: compression.compress_gradients(layer(), "int8"),
        "compress_gradients: expected state to be of type CompressionState, got 'int8'",
    ),
    "a model for a folder": (
        lambda: distributed.checkpoint.save(layer(), "folder"),
        r"checkpoint.save: expected path to be of type str or PathLike, got MoELayer",
    ),
    "a folder for a model": (
        lambda: distributed.checkpoint.load("folder", "model"),
        r"checkpoint.load: expected model to be of type Module, got 'model'",
    ),
    "a folder without a checkpoint": (
        lambda: distributed.checkpoint.load("/nowhere", layer()),
        r"checkpoint.load: expected path to be a folder with a whole checkpoint, got /nowhere, "
        r"which has no .metadata",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_first_hour_is_told(mistake):
    act, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=message):
        act()


def make_mistakes_over_ranks(rank):
    """Messages, on this rank, of mistakes that need others."""
    devices = torch.distributed.init_device_mesh("cpu", (2,))
    group = torch.distributed.group.WORLD
    empty = "/nowhere"
    acts = (
        lambda: layer(num_experts=3, ep_group=group),
        lambda: layer(ep_group=devices),
        lambda: distributed.checkpoint.load(empty, layer(ep_group=group)),
    )
    found = []
    for act in acts:
        with pytest.raises(Exception) as caught:
            act()
        found.append(f"{type(caught.value).__name__} {caught.value}")
    return found


def test_a_mistake_over_ranks_is_told_on_every_rank():
    patterns = (
        "ValueError MoELayer: expected num_experts to be a multiple of the group size 2, got 3",
        r"TypeError MoELayer: expected ep_group to be .*; its get_group\(\) is one$",
        "FileNotFoundError checkpoint.load: expected path to be a folder with a whole checkpoint",
    )
    for of_rank in spawn_ranks(make_mistakes_over_ranks, 2):
        for message, pattern in zip(of_rank, patterns, strict=True):
            assert re.match(pattern, message), message
