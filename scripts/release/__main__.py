"""The command line of the release tools; scripts/*.sh call it and show its help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from scripts.release import operation
from scripts.release.bisect import bisect
from scripts.release.cut import cut
from scripts.release.git import Git, ReleaseError
from scripts.release.pick import pick
from scripts.release.revert import revert

UNIT_TESTS = "scripts/test.sh tests/unit -q"
CASE = "tests/functional/run_case.sh {case}"


def _operation(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help=f"what to {verb}")
    parser.add_argument("--onto", help="core_rX.Y or dev")
    parser.add_argument("--main", default="main", help="where commits must have landed first")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done and whether it applies"
    )
    parser.add_argument("--merge", action="store_true", help="fast-forward the release branch when green")
    parser.add_argument("--unit-tests", default=UNIT_TESTS, help='"" for none; default: %(default)s')
    parser.add_argument("--case-command", default=CASE, help='"" for none; default: %(default)s')
    parser.add_argument("--continue", dest="resume", action="store_true", help="go on after a stop")
    parser.add_argument("--abort", action="store_true", help="go back to where it began")


def parser() -> argparse.ArgumentParser:
    """The four commands."""
    top = argparse.ArgumentParser(prog="scripts.release", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    picks = commands.add_parser("pick", prog="scripts/cherry_pick.sh", description="Pick commits of main.")
    _operation(picks, "pick")
    reverts = commands.add_parser(
        "revert", prog="scripts/revert_release.sh", description="Take commits out of a release branch."
    )
    _operation(reverts, "revert")
    reverts.add_argument("--reason", help="why, for the message")
    reverts.add_argument("--case", help="the functional case that caused it; a later pick runs it first")
    cuts = commands.add_parser("cut", prog="scripts/cut_release.sh", description="Release a version.")
    cuts.add_argument("version", help="X.Y: a new branch; X.Y.Z: a patch release")
    cuts.add_argument("--main", default="main")
    cuts.add_argument("--dry-run", action="store_true")
    finds = commands.add_parser(
        "bisect", prog="scripts/bisect_golden.sh", description="Find the commit that moved a case."
    )
    finds.add_argument("case")
    finds.add_argument("--good", required=True)
    finds.add_argument("--bad", default="HEAD")
    finds.add_argument(
        "--values-of", help="judge by the golden values of this commit, not by each commit's own"
    )
    finds.add_argument("--case-command", default=CASE)
    return top


def _run(options: argparse.Namespace) -> int:
    git = Git(".")
    if options.command in ("pick", "revert"):
        if options.resume or options.abort:
            return operation.resume(git) if options.resume else operation.abort(git)
        if not options.commits or not options.onto:
            raise ReleaseError("name the commits and the branch: COMMIT... --onto core_rX.Y")
        if options.command == "revert" and not options.reason:
            raise ReleaseError("--reason is missing: say why, for those who want to land it again")
    commands: dict[str, Callable[[argparse.Namespace, Git], int]]
    commands = {"pick": pick, "revert": revert, "cut": cut, "bisect": bisect}
    return commands[options.command](options, git)


def main(argv: list[str] | None = None) -> int:
    """Run a command; 2 for what the user must change, else the command's own status."""
    options = parser().parse_args(argv)
    try:
        return _run(options)
    except (ReleaseError, RuntimeError, OSError) as error:  # the latter: git, or a command that is not there
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
