"""The command `heart`: parses arguments, calls one function of this folder, turns errors into one sentence."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys

from .. import __version__, plugins
from ..errors import HeartError

# One module a topic; each offers `register(subparsers)`. Heavy imports stay inside the commands themselves.
TOPICS = ("info", "generate", "calibrate", "tune", "compare", "frontier", "study", "report")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="heart", description="Faster video diffusion without retraining.")
    parser.add_argument("--version", action="version", version=f"heart-attention {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens inside")
    _add_plugin(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for topic in TOPICS:
        importlib.import_module(f".{topic}", __package__).register(commands)
    return parser


def _add_plugin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module that registers things of your own",
    )


def _load_plugins(argv: list[str] | None) -> None:
    """Import the modules named by --plugin, and installed ones: their names are then choices of the command line."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_plugin(early)
    plugins.load(early.parse_known_args(argv)[0].plugin)


# Costs nothing on a quiet machine, and beside a busy neighbour takes a third off (docs/troubleshooting.md).
SPIN = "1000"


def _set_spin() -> None:
    """Tell libgomp how long idle threads spin for work, unless the user did; it reads that once, when torch loads it."""
    spin = os.environ.get("HEART_SPIN", "")
    if spin.isascii() and spin.isdigit():
        os.environ.setdefault("GOMP_SPINCOUNT", spin)
    elif "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 done, 1 failed, 2 wrong usage."""
    _set_spin()
    try:
        _load_plugins(argv)
    except HeartError as error:
        print(f"heart: {error}", file=sys.stderr)
        return 1
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    try:
        status = args.func(args) or 0
        sys.stdout.flush()  # here, not at the interpreter's end, is where a reader that went away can be forgiven
        return status
    except KeyboardInterrupt:
        print("heart: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has seen enough: `heart show F | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 0
    except (HeartError, OSError) as error:
        if args.debug:
            raise
        print(f"heart: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # what nobody foresaw, most often a library that refuses an argument
        if args.debug:
            raise
        lines = str(error).strip().splitlines() or ["no message"]
        print(f"heart: {type(error).__name__}: {lines[0]} (--debug shows where)", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
