"""Installs what the repository's commands need into the virtual environment that runs this file.

`install.py` installs the `dev` extra of pyproject.toml, `install.py --extra NAME` another one;
`install.py --torch VERSION NAME...` installs that torch and, of `dev`, the named packages alone.
"""

import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extra: str) -> list[str]:
    """The pins of an extra, with the project's own extras spelt out."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    pins = []
    for pin in extras[extra]:
        pins += extras["examples"] if pin == "moe_ext[examples]" else [pin]
    return pins


def main() -> None:
    """Installs with pip, and fails with its exit code."""
    extra = sys.argv[sys.argv.index("--extra") + 1] if "--extra" in sys.argv else "dev"
    pins = requirements(extra)
    if "--torch" in sys.argv:
        version, *names = sys.argv[sys.argv.index("--torch") + 1 :]
        pins = [f"torch=={version}", *(pin for pin in pins if pin.split("==")[0] in names)]
    # Python compiles what it imports; pip would compile every module of every package.
    options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", *options]
    sys.exit(subprocess.call([*command, *pins]))


if __name__ == "__main__":
    main()
