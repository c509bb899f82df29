"""`heart report`, `heart project` and `heart fetch-weights`: a page, projected times, and files for metrics."""

from __future__ import annotations

import argparse

from .arguments import add_command


def register(commands) -> None:
    """Add the commands of this file."""
    report = add_command(commands, "report", "one HTML file from a results folder", run_report)
    report.add_argument("folder", metavar="DIR", help="what compare, demo or ablate wrote")
    report.add_argument("--out", metavar="FILE.html", help="the page's name (default: report.html in the folder)")

    fetch = add_command(commands, "fetch-weights", "put metric weights or prompts into the user's cache", run_fetch)
    fetch.add_argument("what", choices=["lpips", "vbench"], help="LPIPS networks, or VBench's prompt suite")
    fetch.add_argument("--file", help="an archive already downloaded")

    from ..evaluation import projection

    project = add_command(commands, "project", "projected times on a GPU from a roofline model", projection.run)
    projection.add_arguments(project)


def run_report(args: argparse.Namespace) -> int:
    """Write the page and say where."""
    from ..evaluation.report import report

    print(report(args.folder, args.out))
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Fetch, check, unpack."""
    from ..evaluation.metrics import lpips, vbench

    paths = lpips.fetch(args.file) if args.what == "lpips" else [vbench.fetch(args.file)]
    print(*paths, sep="\n")
    return 0
