"""What is in a calibration, to look at: a summary, a picture in the terminal, a PNG."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HeartError, printable
from . import choices
from .file import Calibration

SHADES = " ░▒▓█"  # low threshold (sparse) … high (nearly dense), where there is no colour
# Dark violet (low) over teal to yellow (high): five corners of a map that grows evenly brighter.
_CORNERS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], float)


def colour(share: np.ndarray) -> np.ndarray:
    """RGB (0 … 255) of numbers from 0 to 1, [..., 3]."""
    place = np.clip(share, 0, 1) * (len(_CORNERS) - 1)
    low = np.minimum(place.astype(int), len(_CORNERS) - 2)
    part = (place - low)[..., None]
    return np.rint(_CORNERS[low] * (1 - part) + _CORNERS[low + 1] * part).astype(np.uint8)


def _share(calibration: Calibration) -> np.ndarray:
    """Each threshold's place between the least and the greatest candidate, 0 … 1."""
    values = calibration.thresholds
    ends = [point["threshold"] for point in calibration.points]
    low, high = float(np.min(ends)), float(np.max(ends))
    return (values - low) / (high - low) if high > low else np.full(values.shape, 0.5)


def counts(calibration: Calibration) -> dict[float, int]:
    """How many heads have each threshold, candidates without a head included."""
    values = calibration.thresholds
    known = np.unique([point["threshold"] for point in calibration.points])
    return {float(t): int((values == t).sum()) for t in known}


def summary(calibration: Calibration) -> dict[str, Any]:
    """The figures of a calibration as plain JSON."""
    c = calibration
    out: dict[str, Any] = {
        "model": c.model,
        "backbone": c.backbone,
        "rest": c.rest,
        "points": [{**point, "heads": int((c.choice == k).sum())} for k, point in enumerate(c.points)],
        "phases": c.phases,
        "cost": c.density_cost,
        "method": c.method,
        "layers": c.layers,
        "heads": c.heads,
        "mean_threshold": math.fsum(c.thresholds.ravel()) / c.thresholds.size,
        "thresholds": {f"{t:g}": n for t, n in counts(c).items()},
        "sparsity": c.sparsity,
        "error": c.error,
        "solver": c.solver,
        "joint_error_of_shared": joint_ratios(c),
        "joint_error_of_shared_by_context": context_ratios(c),
        "verification": c.verification,
        "size": {"height": c.height, "width": c.width, "frames": c.frames, "steps": c.steps},
        "scheduler": c.scheduler,
        "prompts": c.prompts,
        "seed": c.seed,
        "settings": c.settings,
        "versions": c.versions,
    }
    return out


def joint_ratios(calibration: Calibration) -> dict[str, float]:
    """Joint error of these thresholds over that of the shared one, by set of contexts."""
    out = {}
    for name, figures in calibration.verification.items():
        try:
            out[name] = figures["chosen"]["error"] / figures["shared"]["error"]
        except (TypeError, KeyError, ZeroDivisionError):
            continue
    return out


def context_ratios(calibration: Calibration) -> dict[str, float]:
    """The same taken in in_average context and then averaged: what a generation can expect at any of its steps."""
    out = {}
    for name, figures in calibration.verification.items():
        try:
            pairs = zip(figures["chosen"]["errors"], figures["shared"]["errors"], strict=True)
            out[name] = float(np.mean([chosen / shared for chosen, shared in pairs]))
        except (TypeError, KeyError, ValueError, ZeroDivisionError):
            continue
    return out


# ---------------------------------------- terminal


def text(calibration: Calibration, colours: bool = False) -> str:
    """The picture and the facts, for a terminal; no text of the file can steer it."""
    return "\n".join([*_grid(calibration, colours), "", *_legend(calibration, colours), "", *_facts(calibration)])


def _cell(share: float, rank: int | None, colours: bool) -> str:
    """Two characters: a coloured block, or a shade with the candidate's number (where one digit is enough)."""
    if colours:
        r, g, b = colour(np.array(share))
        return f"\x1b[48;2;{r};{g};{b}m  \x1b[0m"
    shade = SHADES[min(int(share * len(SHADES)), len(SHADES) - 1)]
    return shade + (shade if rank is None else str(rank))


def _ranks(calibration: Calibration) -> dict[float, int | None]:
    known = list(counts(calibration))
    return {tau: i if len(known) <= 10 else None for i, tau in enumerate(known)}


def _grid(calibration: Calibration, colours: bool) -> list[str]:
    """A picture of the thresholds, or where points are of several kinds of which point each head takes, by phase."""
    head = "layer " + "".join(f"{h:<2}" if h % 5 == 0 else "  " for h in range(calibration.heads)) + "  mean τ"
    taus, share, rank = _by_phase(calibration, calibration.thresholds), _share(calibration), _ranks(calibration)
    lines = []
    for phase, (table, shares, choice) in enumerate(
        zip(taus, _by_phase(calibration, share), _by_phase(calibration, calibration.choice))
    ):
        lines += [f"phase {phase}, {_phase_words(calibration, phase)}"] if calibration.phase_count > 1 else []
        lines.append(head.rstrip())
        for layer, row in enumerate(table):
            if calibration.simple:
                cells = "".join(_cell(s, rank[float(t)], colours) for s, t in zip(shares[layer], row))
            else:
                cells = "".join(f"{_letter(k)} " for k in choice[layer])
            lines.append(f"{layer:>5} {cells}  {row.mean():.3f}")
    return lines


def _by_phase(calibration: Calibration, table: np.ndarray) -> np.ndarray:
    return table if calibration.phase_count > 1 else table[None]


def _phase_words(calibration: Calibration, phase: int) -> str:
    """The noise levels of a phase and how much its error counts."""
    bounds = [1.0, *calibration.phases["sigmas"], 0.0]
    return f"σ {bounds[phase]:.3g} … {bounds[phase + 1]:.3g}, weight {calibration.phases['weights'][phase]:.3g}"


def _letter(point: int) -> str:
    """One character for a point: a–z, A–Z, then +."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return letters[point] if point < len(letters) else "+"


def point_words(point: dict[str, Any]) -> str:
    """An operating point in a few words."""
    order = point["order"] if isinstance(point["order"], str) else "an order for every head"
    return printable(f"{point['backbone']['name']} τ {point['threshold']:g}, rest {point['rest']}, {order}")


def _legend(calibration: Calibration, colours: bool) -> list[str]:
    if not calibration.simple:
        return _point_legend(calibration)
    heads_with, rank = counts(calibration), _ranks(calibration)
    low, high = min(heads_with), max(heads_with)
    out = []
    for tau, n in heads_with.items() if len(heads_with) <= 12 else ():
        share = (tau - low) / (high - low) if high > low else 0.5
        bar = "▪" * round(30 * n / calibration.thresholds.size)
        out.append(f"{_cell(share, rank[tau], colours)} τ {tau:<6g} {n:>5} heads  {bar}".rstrip())
    return out or [f"τ from {low:g} to {high:g}"]


def _point_legend(calibration: Calibration) -> list[str]:
    """How many heads take each point, phase by phase; points that nobody takes are left out."""
    tables = _by_phase(calibration, calibration.choice)
    lines = []
    for k, point in enumerate(calibration.points):
        heads = [int((table == k).sum()) for table in tables]
        if sum(heads):
            told = "  ".join(f"{n:>4}" for n in heads)
            lines.append(f"{_letter(k)}  {told} heads  {point_words(point)}")
    return lines


def _facts(c: Calibration) -> list[str]:
    model = c.model or {}
    name = f"{model.get('class', 'unknown model')}, {c.layers} layers × {c.heads} heads"
    size = f"{c.width}×{c.height}, {c.frames} frames, {c.steps} steps" if c.width else ""
    lines = [
        ("model", name),
        ("backbone", _settings(c.backbone) if c.backbone else c.backbone_names),
        ("method", c.method),
    ]
    lines += [("measured at", ", ".join(x for x in (size, c.scheduler or "") if x))]
    lines += [("error", _settings(c.error)), ("budget", _budget(c)), ("solver", _solver(c))]
    lines += [("joint error", _joint(c)), ("mean τ", f"{c.thresholds.mean():.4f}")]
    prompts = f"{c.prompts.get('count', '?')} prompts ({str(c.prompts.get('hash', ''))[:8]}…)" if c.prompts else ""
    seed = "" if c.seed is None else f"seed {c.seed}"
    lines += [("draws", ", ".join(x for x in (prompts, seed, _settings(c.settings, 6)) if x))]
    lines += [("versions", ", ".join(f"{k} {v}" for k, v in c.versions.items()))]
    return [f"{label:<12}{printable(str(value))}" for label, value in lines if value]


def _settings(values: dict[str, Any], most: int = 99) -> str:
    if not values:
        return ""
    rest = [f"{k}={v}" for k, v in values.items() if k != "name" and not isinstance(v, dict)][:most]
    return " ".join([str(values.get("name", "")), ", ".join(rest)]).strip()


def _budget(c: Calibration) -> str:
    budget = c.solver.get("budget", {})
    asked = ", ".join(f"{k.replace('_', ' ')} {v:.6g}" for k, v in budget.items() if isinstance(v, int | float))
    got = "" if c.sparsity is None else f"reached: mean sparsity {c.sparsity:.6f}"
    return "; ".join(x for x in (asked, got) if x)


def _solver(c: Calibration) -> str:
    report = c.solver
    if "objective" not in report:
        return ""
    proof = "optimum proved" if report.get("proven") else f"certified within {report.get('gap', math.nan):.3g}"
    return f"{report.get('method', '')}, objective {report['objective']:.6g}, {proof}"


def _joint(c: Calibration) -> str:
    in_average = context_ratios(c)
    parts = []
    for name, ratio in joint_ratios(c).items():
        more = f", {in_average[name]:.3f} in the average context" if name in in_average else ""
        parts.append(f"{ratio:.3f} of the shared threshold's{more} ({name.replace('_', ' ')})")
    return "; ".join(parts)


# ---------------------------------------- PNG


def picture(calibration: Calibration, path: str | os.PathLike, matplotlib: bool | None = None) -> Path:
    """Heads × thresholds as a PNG: by matplotlib where it is installed, else by a plainer drawing of our own."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise HeartError(f"the picture's name is {path.name!r}: it must end in .png")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not calibration.simple:
        return choices.picture(calibration, path)
    if matplotlib is None:
        import importlib.util

        matplotlib = importlib.util.find_spec("matplotlib") is not None
    (_by_matplotlib if matplotlib else _by_pillow)(calibration, path)
    return path


def _title(c: Calibration) -> str:
    sparsity = "" if c.sparsity is None else f", mean sparsity {c.sparsity:.3f}"
    name = c.model["class"] if c.model else "imported"
    return f"{name}, {c.backbone_names}, {c.method}: mean τ {c.thresholds.mean():.3f}{sparsity}"


def _by_matplotlib(c: Calibration, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    phases = c.phase_count
    size = (max(5.0, 0.22 * c.heads * phases + 4.0), max(2.6, 0.22 * c.layers + 1.4))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    *grids, bars = figure.subplots(1, phases + 1, width_ratios=[*[max(2.0, c.heads / 8)] * phases, 1])
    ends = [point["threshold"] for point in c.points]
    names = c.backbone_names.split("+")
    image: Any = None
    for phase, (grid, taus, choice) in enumerate(zip(grids, _by_phase(c, c.thresholds), _by_phase(c, c.choice))):
        map_ = ListedColormap(colour(np.linspace(0, 1, 256)) / 255)
        image = grid.imshow(taus, cmap=map_, vmin=np.min(ends), vmax=np.max(ends), aspect="auto")
        grid.set_xlabel("head" if phases == 1 else f"head, phase {phase}")
        if len(names) > 1:  # the backbone by its first letter
            for layer, head in np.ndindex(*choice.shape):
                letter = c.points[choice[layer, head]]["backbone"]["name"][0]
                grid.text(head, layer, letter, ha="center", va="center", fontsize=6, color="white")
    grids[0].set_ylabel("layer")
    figure.colorbar(image, ax=grids, label="threshold τ")
    heads_with = counts(c) if c.simple else {n: _heads_of(c, n) for n in names}
    bars.bar([t if isinstance(t, str) else f"{t:g}" for t in heads_with], list(heads_with.values()), color="#3b528b")
    bars.yaxis.get_major_locator().set_params(integer=True)
    bars.set_xlabel("τ" if c.simple else "backbone")
    bars.set_ylabel("heads" if phases == 1 else "heads and phases")
    bars.tick_params(axis="x", rotation=90 if len(heads_with) > 4 or not c.simple else 0)
    figure.suptitle(_title(c), fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})  # no version inside: equal pictures, equal bytes


def _heads_of(c: Calibration, name: str) -> int:
    """How many heads (in all phases) take a backbone."""
    return sum(int((c.choice == k).sum()) for k, point in enumerate(c.points) if point["backbone"]["name"] == name)


def _by_pillow(c: Calibration, path: Path) -> None:
    from PIL import Image, ImageDraw

    cell, left, top = max(6, min(24, 1200 // max(c.heads, c.layers))), 46, 30
    shares = np.concatenate(list(_by_phase(c, _share(c))), axis=1)  # phases side by side
    tiles = np.kron(colour(shares), np.ones((cell, cell, 1), np.uint8))
    height, width = tiles.shape[:2]
    legend = list(counts(c).items())[:40]
    canvas = Image.new(
        "RGB", (max(left + width + 150, 460), max(top + height + 24, top + 16 * len(legend) + 10)), "white"
    )
    canvas.paste(Image.fromarray(tiles), (left, top))
    draw = ImageDraw.Draw(canvas)
    draw.text((6, 8), _plain_ascii(_title(c)), fill="black")
    for layer in range(0, c.layers, max(1, 14 // cell)):
        draw.text((6, top + layer * cell), str(layer), fill="black")
    for head in range(0, c.heads, max(1, 24 // cell)):
        draw.text((left + head * cell, top + height + 4), str(head), fill="black")
    low, high = legend[0][0], legend[-1][0]
    for i, (tau, n) in enumerate(legend):
        share = (tau - low) / (high - low) if high > low else 0.5
        y = top + 16 * i
        draw.rectangle((left + width + 16, y, left + width + 28, y + 11), fill=tuple(colour(np.array(share)).tolist()))
        draw.text((left + width + 34, y), f"{tau:g}: {n}", fill="black")
    canvas.save(path, format="PNG")


def _plain_ascii(words: str) -> str:
    """Pillow's built-in font has Latin letters only."""
    return words.replace("τ", "tau").encode("ascii", "replace").decode()
