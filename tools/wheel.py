"""Makes the files of a release, and tries its wheel in fresh environments.

`wheel.py build` packs what git has at HEAD into an sdist, and builds a wheel from that sdist: the
operators, for every torch and every Python that is served, without `_runtime`. The platform in its
name is the oldest glibc that it runs with. With MOE_EXT_CUDA=1 it holds the CUDA operators too, and
its version ends in `+cuda`. Both are left in dist/.

`wheel.py check [TORCH@PYTHON...]` installs the wheel beside the torch that runs this file, then
beside each other one, and runs the first program of docs/tour.md on two ranks.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
# In the folder of torch, where the loader finds them.
TORCH_LIBRARIES = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so")


def run(command: list[str | Path], folder: Path, **more: str) -> str:
    """The output of a command in a shell that knows nothing of this repository."""
    ours = ("PYTHON", "MOE_EXT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    shell = {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True)
    if done.returncode:
        called = " ".join(map(str, command))
        sys.exit(f"{done.stdout}{done.stderr}\n{called}: ended with {done.returncode}")
    return done.stdout


def build() -> None:
    """Fills dist/ with the sdist and the wheel of HEAD."""
    cuda = os.environ.get("MOE_EXT_CUDA") == "1"
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(["git", "archive", "--output", folder / "head.tar", "HEAD"], ROOT)
        with tarfile.open(folder / "head.tar") as file:
            file.extractall(folder / "head", filter="data")
        call = f"import setup; setup.build_sdist({str(DIST)!r})"
        run([sys.executable, "-c", call], folder / "head")
        (sdist,) = DIST.glob("*.tar.gz")
        options = {"MOE_EXT_RUNTIME": "0", "MOE_EXT_CUDA": str(int(cuda))}
        for option in ("MAX_JOBS", "TORCH_CUDA_ARCH_LIST"):
            options |= {option: os.environ[option]} if option in os.environ else {}
        wheel = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
        if cuda:
            tag = ("egg_info", "--tag-build=+cuda")
            wheel += [f"--config-settings=--global-option={word}" for word in tag]
        run([*wheel, "--wheel-dir", folder, sdist], folder, **options)
        repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST]
        repair += [f"--exclude={library}" for library in TORCH_LIBRARIES]
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        run([*repair, *folder.glob("*.whl")], folder, PATH=beside)
    for path in sorted(DIST.iterdir()):
        print(f"wheel.py: {path.stat().st_size / 2**20:.1f} MiB {path.relative_to(ROOT)}")


def find_python(version: str) -> str | None:
    """An interpreter of this version; pyenv's stand-ins answer to a variable."""
    found = shutil.which(f"python{version}")
    call = [found or "", "-c", "import sys; print(sys.executable)"]
    shell = {**os.environ, "PYENV_VERSION": version}
    done = found and subprocess.run(call, env=shell, capture_output=True, text=True)
    return done.stdout.strip() if done and done.returncode == 0 else None


def check(wheel: Path, torch: str, python: str) -> None:
    """Installs the wheel into a new environment, and trains there on two ranks."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_docs_tour import equals, sections

    start = time.monotonic()
    _, ((script, text), *_), ((command, shown), *_) = next(sections())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([python, "-m", "venv", "venv"], folder)
        here = folder / "venv" / "bin" / "python"
        install = [here, "-m", "pip", "install", "--quiet", "--no-compile"]
        run([*install, f"torch=={torch}", "numpy"], folder)
        run([*install, "--no-index", wheel], folder)
        report = run([here, "-m", "moe_ext", "info"], folder)
        (folder / script).write_text(text)
        path = f"{here.parent}{os.pathsep}{os.environ['PATH']}"
        printed = run(["bash", "-c", command], folder, PATH=path)
        if str(folder) not in report or not equals(shown, printed):
            sys.exit(
                f"{report}\n{printed}\nwheel.py: expected the output of docs/tour.md:\n{shown}"
            )
    versions = report.partition(", transformers")[0].splitlines()[0]
    print(f"wheel.py: {versions}: two ranks train, {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    """Runs the command that is named."""
    if sys.argv[1:] == ["build"]:
        return build()
    import torch

    (wheel,) = DIST.glob("*.whl")
    check(wheel, torch.__version__.partition("+")[0], sys.executable)
    for pair in sys.argv[2:]:
        torch_version, _, python_version = pair.partition("@")
        python = find_python(python_version)
        if python is None:
            print(
                f"wheel.py: no Python {python_version} here: torch {torch_version} under this one"
            )
        check(wheel, torch_version, python or sys.executable)


if __name__ == "__main__":
    main()
