"""``python -m moe_ext info`` prints what this installation has, ``plan`` a placement of a job."""

import argparse
import sys

from moe_ext import _info


def main() -> None:
    """Parses the command line and runs its command."""
    parser = argparse.ArgumentParser(prog="python -m moe_ext", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, backends, CPU features, operators")
    info.add_argument("--brief", action="store_true", help="one line")
    planner = commands.add_parser("plan", help="the placement of a model on a cluster")
    from moe_ext.planner import cli

    cli.add_arguments(planner)
    arguments = parser.parse_args()
    if arguments.command == "plan":
        sys.exit(cli.run(arguments))
    print(_info.report(arguments.brief))


if __name__ == "__main__":
    main()
