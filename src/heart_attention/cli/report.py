"""`heart report`, `heart project` and `heart fetch-weights`: a page, projected times, and files for metrics."""

from __future__ import annotations

import argparse

from .arguments import add_command


def register(commands) -> None:
    """Add the commands of this file."""
    report = add_command(commands, "report", "one HTML file from a results folder", run_report)
    report.add_argument("folder", metavar="DIR", help="what compare, demo or ablate wrote")
    report.add_argument("--out", metavar="FILE.html", help="the page's name (default: report.html in the folder)")
    report.add_argument(
        "--animation", metavar="FILE.webp", help="also the first prompt's videos side by side (.webp, .gif)"
    )
    report.add_argument("--plot", metavar="FILE.svg", help="also speed against quality as a picture")

    fetch = add_command(commands, "fetch-weights", "put metric weights or prompts into the user's cache", run_fetch)
    fetch.add_argument("what", choices=["lpips", "vbench"], help="LPIPS networks, or VBench's prompt suite")
    fetch.add_argument("--file", help="an archive already downloaded")

    from ..evaluation import projection

    project = add_command(commands, "project", "projected times on a GPU from a roofline model", projection.run)
    projection.add_arguments(project)


def run_report(args: argparse.Namespace) -> int:
    """Write the page and say where."""
    from ..evaluation.report import picture, report

    print(report(args.folder, args.out))
    if args.animation:
        print(picture.animation(args.folder, args.animation))
    if args.plot:
        print(picture.front(args.folder, args.plot))
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Fetch, check, unpack."""
    from ..evaluation.metrics import lpips, vbench

    paths = lpips.fetch(args.file) if args.what == "lpips" else [vbench.fetch(args.file)]
    print(*paths, sep="\n")
    return 0
