"""VBench and VisionReward, which need environments of their own: videos and prompts out, their JSON back in.

1. `export(rows, folder)` lays out one folder a method: `<prompt>-<seed>.mp4` as VBench wants it, and `prompts.json`.
2. The user runs the judge there, in its own environment; `commands(...)` prints the lines to type.
3. `read_vbench` and `read_visionreward` check the judge's JSON and make one score a method of it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

from ...errors import HeartError
from ...files import read_json, write_json

# The paper's six dimensions: (lowest, highest, weight, kind), by VBench's published constants.
DIMENSIONS = {
    "subject_consistency": (0.1462, 1.0, 1.0, "quality"),
    "motion_smoothness": (0.706, 0.9975, 1.0, "quality"),
    "dynamic_degree": (0.0, 1.0, 0.5, "quality"),
    "aesthetic_quality": (0.0, 1.0, 1.0, "quality"),
    "imaging_quality": (0.0, 1.0, 1.0, "quality"),
    "overall_consistency": (0.0, 0.364, 1.0, "semantic"),
}
KIND_WEIGHT = {"quality": 4.0, "semantic": 1.0}


def safe_name(text: str, limit: int = 150) -> str:
    """A prompt as part of a file name."""
    return re.sub(r"[^\w ,.'-]", "_", text).strip()[:limit] or "empty"


def export(rows: list[dict], folder: str | Path) -> Path:
    """Copy the videos of result rows (each with method, prompt, seed, video) into the layout that judges read."""
    folder = Path(folder)
    listing: dict[str, dict[str, str]] = {}
    for row in rows:
        source = Path(row["video"])
        if not source.is_file():
            raise HeartError(f"the video {str(source)!r} of method {row['method']!r} is gone: run the comparison again")
        name = f"{safe_name(row['prompt'])}-{row['seed']}{source.suffix}"
        target = folder / row["method"] / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        listing.setdefault(row["method"], {})[name] = row["prompt"]
    for method, prompts in listing.items():
        write_json(folder / method / "prompts.json", prompts)
    return folder


def commands(folder: str | Path, method: str) -> list[str]:
    """What to type, each in the judge's own environment, to score one method's folder."""
    path = Path(folder) / method
    return [
        f"vbench evaluate --videos_path {path} --dimension {' '.join(DIMENSIONS)} --mode custom_input"
        f" --prompt_file {path / 'prompts.json'} --output_path {path / 'vbench'}",
        f"python VisionReward_Video/inference-video.py --score --video_dir {path} --prompts {path / 'prompts.json'}"
        f" > {path / 'visionreward.json'}",
    ]


def _score(value, name: str, path: Path) -> float:
    number = value[0] if isinstance(value, list) and value else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise HeartError(
            f"{path}: dimension {name!r} has no finite score but {str(number)[:40]!r}: run VBench on it again"
        )
    return float(number)


def vbench_total(scores: dict[str, float]) -> float:
    """VBench's official weighting restricted to the paper's six dimensions, in 0..1."""
    sums = {kind: [0.0, 0.0] for kind in KIND_WEIGHT}
    for name, (low, high, weight, kind) in DIMENSIONS.items():
        sums[kind][0] += weight * (scores[name] - low) / (high - low)
        sums[kind][1] += weight
    means = {kind: total / weight for kind, (total, weight) in sums.items()}
    return sum(KIND_WEIGHT[kind] * means[kind] for kind in means) / sum(KIND_WEIGHT.values())


def read_vbench(path: str | Path) -> dict[str, float]:
    """VBench's `*_eval_results.json` as scores of the six dimensions and `total`."""
    path = Path(path)
    data = read_json(path)
    if not isinstance(data, dict):
        raise HeartError(f"{path} is not a VBench result: expected an object with one entry a dimension")
    missing = [name for name in DIMENSIONS if name not in data]
    if missing:
        raise HeartError(f"{path} lacks the VBench dimension {missing[0]!r}: evaluate all of {', '.join(DIMENSIONS)}")
    scores = {name: _score(data[name], name, path) for name in DIMENSIONS}
    return {**scores, "total": vbench_total(scores)}


def read_visionreward(path: str | Path) -> float:
    """Mean VisionReward score; accepts a list of {"video", "score"} or an object of file name → score."""
    path = Path(path)
    data = read_json(path)
    values = (
        [e.get("score") for e in data if isinstance(e, dict)]
        if isinstance(data, list)
        else list(getattr(data, "values", list)())
    )
    if not values:
        raise HeartError(f"{path} holds no VisionReward scores: expected a list of objects with 'video' and 'score'")
    return sum(_score(v, f"entry {i}", path) for i, v in enumerate(values)) / len(values)


def attach_scores(results: dict, folder: str | Path) -> dict:
    """Add `vbench` and `visionreward` to the rows of a results file from the judges' JSON below `folder`."""
    results = json.loads(json.dumps(results))
    for method in {row["method"] for row in results["rows"]}:
        found = sorted((Path(folder) / method).glob("vbench/*_eval_results.json"))
        reward = Path(folder) / method / "visionreward.json"
        for row in results["rows"]:
            if row["method"] == method:
                row["vbench"] = read_vbench(found[-1])["total"] if found else None
                row["visionreward"] = read_visionreward(reward) if reward.is_file() else None
    if not any(row["vbench"] is not None or row["visionreward"] is not None for row in results["rows"]):
        raise HeartError(f"no judge's scores lie in {str(folder)!r}: run the commands that --judges prints first")
    return results
