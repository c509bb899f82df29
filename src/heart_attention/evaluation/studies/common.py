"""What all studies share: rank correlation, and writing numbers, figure and paragraph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...files import write_atomic, write_json

PAPER_BACKBONES = ("xattention", "svg2")  # those that the paper studies


def configs(pipe: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """The presets for this model by backbone's name; of those that the paper has unless others are named."""
    from ...presets import preset

    return {name: preset(name, pipe) for name in names or PAPER_BACKBONES}


def fitted(config: Any, tokens: int) -> Any:
    """A config's backbone as the engine would use it for so many tokens."""
    return config.backbone.scaled_to(tokens) if config.scale_clusters else config.backbone


def draw_layer(layers: int, seed: int) -> int:
    """The layer whose heads a figure shows: drawn, as in the paper, but by a seed."""
    return int(np.random.default_rng(seed).integers(layers))


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
