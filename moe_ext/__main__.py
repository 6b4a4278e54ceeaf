"""``python -m moe_ext info`` prints what this installation has and what is missing."""

import argparse

from moe_ext import _info


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m moe_ext", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, backends, CPU features, operators")
    info.add_argument("--brief", action="store_true", help="one line")
    print(_info.report(parser.parse_args().brief))


if __name__ == "__main__":
    main()
