"""What all studies share: watching a dense generation, and writing numbers, figure and paragraph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...files import write_atomic, write_json
from ...models.inspect import transformers_of
from ...online.call import Handler

Visit = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class Watcher(Handler):
    """A handler that lets every call run dense and shows one guidance branch of it to `visit`."""

    def __init__(self, visit: Visit) -> None:
        self.visit, self.branch = visit, None

    def start_forward(self, call) -> None:
        """Take the first branch seen as the one to watch (the conditional one in diffusers' pipelines)."""
        self.branch = self.branch or call.branch

    def attend(self, call, q, k, v, dense):
        """Run dense, then let the visitor look at q, k, v and the output, all [B, H, N, D]."""
        out = dense(q, k, v)
        if call.branch == self.branch:
            self.visit(call, q, k, v, out)
        return out


@torch.no_grad()
def watch(pipe, call: dict, prompt: str, seed: int, visit: Visit) -> None:
    """One dense generation, without decoding, in which `visit(where, q, k, v, out)` sees each attention call."""
    from ...models.attachment import attach

    handler = Watcher(visit)
    attachment = attach(transformers_of(pipe)[0], handler, scheduler=lambda: pipe.scheduler)
    try:
        generator = torch.Generator("cpu").manual_seed(seed)
        pipe(prompt, generator=generator, output_type="latent", **call)
    finally:
        attachment.detach()


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation; 0 when one side does not vary."""
    from scipy import stats

    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(stats.spearmanr(x, y).statistic)


def save(out: str | Path, name: str, numbers: dict, paragraph: str, draw: Callable[[Any], Any] | None = None) -> dict:
    """Write `<name>.json`, `<name>.md` and, if matplotlib is there, `<name>.svg` and `.png`; returns the finding."""
    out = Path(out)
    finding = {"study": name, "finding": paragraph, **numbers}
    write_json(out / f"{name}.json", finding)
    write_atomic(out / f"{name}.md", f"# {name}\n\n{paragraph}\n")
    if draw is not None:
        _figure(out, name, draw)
    return finding


def _figure(out: Path, name: str, draw: Callable[[Any], Any]) -> None:
    import io
    import logging

    try:
        import matplotlib
    except ImportError:
        logging.getLogger(__name__).warning("no figure for %s: install heart-attention[plots]", name)
        return
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "heart"  # the same figure gives the same bytes
    import matplotlib.pyplot as plt

    figure = draw(plt)
    for kind in ("svg", "png"):
        buffer = io.BytesIO()
        figure.savefig(
            buffer, format=kind, dpi=110, bbox_inches="tight", metadata={"Date": None} if kind == "svg" else None
        )
        write_atomic(out / f"{name}.{kind}", buffer.getvalue())
    plt.close(figure)
