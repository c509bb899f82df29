"""Arguments that several commands have in common, written once, and checks that come before anything is loaded."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import HeartError


class HelpFormatter(argparse.HelpFormatter):
    """Help that ends with the default, where there is one and the text does not tell it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = action.default in (None, False, argparse.SUPPRESS) or action.required or "default" in text
        return text if silent or not action.option_strings else f"{text} (default %(default)s)".strip()


def add_command(commands: Any, name: str, summary: str, func: Callable, more: str = "") -> argparse.ArgumentParser:
    """A command with a description; `summary` also stands in the list of commands."""
    text = summary[0].upper() + summary[1:] + "." + (f" {more}" if more else "")
    parser = commands.add_parser(name, help=summary, description=text, formatter_class=HelpFormatter)
    parser.set_defaults(func=func)
    return parser


def add_model(parser: Any) -> None:
    """Which model."""
    parser.add_argument(
        "--model",
        default="tiny",
        help="embedded: tiny, the default, tiny-student, tiny-hunyuan; or a folder, or a hub id",
    )


def add_backbone(parser: Any) -> None:
    """Which backbone: any that is registered."""
    from .. import backbones

    parser.add_argument("--backbone", default="xattention", choices=backbones.names(), help="what predicts masks")


def add_size(parser: Any) -> None:
    """Steps, size and frames of a generation."""
    parser.add_argument("--steps", type=int, help="denoising steps (default: the model's own)")
    parser.add_argument("--size", help="WIDTHxHEIGHT in pixels (default: the model's own)")
    parser.add_argument("--frames", type=int, help="frames of a video (default: the model's own)")


def add_device(parser: Any) -> None:
    """Where and in what precision it runs."""
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")


def add_cluster(parser: Any) -> None:
    """On which machines it runs."""
    parser.add_argument("--ray", metavar="auto|ADDRESS", help="spread the prompts and seeds over a Ray cluster")
    parser.add_argument(
        "--workers", type=int, help="with --ray: how many workers (default: all that there is room for)"
    )


def cluster_of(args: argparse.Namespace) -> Any:
    """The cluster that the user named, or None."""
    import functools

    from ..evaluation import cases, pipelines

    if args.workers is not None and (args.workers < 1 or not args.ray):
        raise HeartError("--workers is the number of Ray workers: give 1 or more, together with --ray")
    if not args.ray:
        return None
    loader = functools.partial(pipelines.load, args.model, args.dtype, args.device)
    return cases.Cluster(args.ray, loader, args.workers)


def add_compile(parser: Any) -> None:
    """Compile what stands around attention."""
    parser.add_argument(
        "--compile", action="store_true", help="compile the model's repeated blocks around attention (dense ones too)"
    )


def announce_compile(args: argparse.Namespace) -> None:
    """With --compile, show when the compiler starts and ends: it makes the first step long."""
    if args.compile:
        logging.getLogger("heart_attention.models.regional_compile").setLevel(logging.INFO)


def add_retime(parser: Any) -> None:
    """Times again."""
    parser.add_argument(
        "--retime", action="store_true", help="generate again what was timed on a busy machine; the rest is kept"
    )


def add_docs(parser: Any) -> None:
    """A page to fill."""
    parser.add_argument("--docs", metavar="PAGE.md", help="also fill that page (docs/reproduction.md of a checkout)")


def check_docs(args: argparse.Namespace, part: str) -> None:
    """The page must be there, with the marks of the part that is filled, before the work begins."""
    if not args.docs:
        return
    if not Path(args.docs).is_file():
        raise HeartError(f"there is no page {args.docs!r} to fill: give docs/reproduction.md of a checkout")
    from ..evaluation.studies import reproduction

    reproduction.check_page(args.docs, part, args.model)


def add_json(parser: Any, what: str = "the result") -> None:
    """Output for machines."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def check_generation(args: argparse.Namespace) -> None:
    """Model, device, precision, size, frames, steps and seed, as far as they can be judged without loading anything."""
    from ..evaluation import pipelines

    pipelines.check(args.model, getattr(args, "dtype", None), getattr(args, "device", None))
    pipelines.check_call(args.size, args.frames, args.steps, args.model)
    seed = getattr(args, "seed", 0)
    if isinstance(seed, int) and seed < 0:
        raise HeartError(f"--seed is {args.seed}: it must be 0 or more")


def check_folder(path: str, option: str) -> Path:
    """A folder to write into: absent or a folder."""
    if Path(path).exists() and not Path(path).is_dir():
        raise HeartError(f"{option} is {path!r}, which is a file: give a folder")
    return Path(path)


def numbers(text: str, name: str, kind: Callable[[str], Any] = float) -> list[Any]:
    """Numbers that are separated by commas, at least one."""
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise HeartError(f"{name} is {text!r}: write numbers separated by commas")
    return found


def seeds_of(args: argparse.Namespace) -> list[int]:
    """The seeds that the user named; each counts once."""
    return list(dict.fromkeys(numbers(args.seeds, "--seeds", int)))


def words(text: str, name: str) -> list[str]:
    """Words that are separated by commas, at least one; each counts once."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise HeartError(f"{name} is {text!r}: write names separated by commas")
    return list(dict.fromkeys(found))
