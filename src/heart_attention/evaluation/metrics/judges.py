"""VBench and VisionReward, which need environments of their own: videos and prompts out, their JSON back in.

1. `export(rows, folder)` lays out one folder a method: `videos/<prompt>-<index>.mp4` as VBench wants it (nothing else may
   lie there), `prompts.json`, and beside the folders the script that runs VisionReward on one of them.
2. The user runs the judges there, each in its own environment; `commands(...)` gives the lines to type.
3. `attach_scores` reads what the judges wrote into the rows of `results.json`.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from ...errors import HeartError, named, shown
from ...files import read_json, write_json
from . import vbench

RUNNER = "visionreward_scores.py"
LIMIT = 230  # bytes of a file name that come from the prompt (VBench's longest has 210); file systems allow 255 in all
VIDEOS = "videos"
PLAIN_PATH = re.compile(r"[\w./+@:=,-]+")


def safe_name(prompt: str) -> str:
    """A prompt as part of a file name: itself where that can be, else shortened and marked by a hash of it."""
    plain = re.sub(r"[^\w ,.'()-]", "_", prompt).strip()
    if plain == prompt and len(prompt.encode()) <= LIMIT:
        return prompt
    short = plain.encode()[: LIMIT - 17].decode(errors="ignore")
    return f"{short or 'prompt'} {hashlib.sha256(prompt.encode()).hexdigest()[:16]}"


def check_folder(folder: str | Path) -> Path:
    """The folder, if VBench can work in it: it hands its arguments to a shell without quotes."""
    path = str(Path(folder).resolve())
    if not PLAIN_PATH.fullmatch(path):
        raise HeartError(f"the judges' folder is {path!r}: VBench cannot read such a path, give one without spaces")
    return Path(folder)


def file_names(rows: list[dict]) -> list[str]:
    """The name of each row's video for the judges; VBench counts samples from 0."""
    seeds = {seed: i for i, seed in enumerate(sorted({row["seed"] for row in rows}))}
    return [f"{safe_name(row['prompt'])}-{seeds[row['seed']]}{Path(row['video']).suffix}" for row in rows]


def _check_same(source: Path, target: Path) -> None:
    """A judge's folder holds one run's videos: scores of another video of the same name would be taken for this one's."""
    if source.is_file() and target.is_file() and not filecmp.cmp(source, target, shallow=False):
        raise HeartError(f"{target} is another video than {source}: give the judges a folder of its own")


def _check_alone(folder: Path, prompts: dict[str, str]) -> None:
    """VBench judges whatever lies there, and what it judged must be all there is."""
    there = {path.name for path in (folder / VIDEOS).glob("*")}
    if others := sorted(there - set(prompts)):
        raise HeartError(
            f"{named(folder)} holds {shown(others[0])} of another run: give the judges a folder of its own"
        )
    if there < set(prompts) and (folder / "vbench").exists():
        raise HeartError(
            f"VBench's scores in {folder} are of fewer videos: remove {folder / 'vbench'} and run it again"
        )


def export(rows: list[dict], folder: str | Path) -> Path:
    """Copy the videos of result rows (each with method, prompt, seed, video) into the layout that judges read."""
    folder = check_folder(folder)
    names, listing = file_names(rows), {}  # type: list[str], dict[str, dict[str, str]]
    for row, name in zip(rows, names):
        source = Path(row["video"])
        if not source.is_file():
            raise HeartError(f"the video {str(source)!r} of method {row['method']!r} is gone: run the comparison again")
        _check_same(source, folder / row["method"] / VIDEOS / name)
        listing.setdefault(row["method"], {})[name] = row["prompt"]
    for method, prompts in listing.items():
        _check_alone(folder / method, prompts)
    for row, name in zip(rows, names):
        target, part = folder / row["method"] / VIDEOS / name, folder / row["method"] / "part"
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file():
            shutil.copyfile(row["video"], part)
            os.replace(part, target)
    for method, prompts in listing.items():
        write_json(folder / method / "prompts.json", prompts)
    shutil.copyfile(Path(__file__).with_name(RUNNER), folder / RUNNER)
    return folder


def commands(folder: str | Path, method: str) -> list[str]:
    """What to type, each in the judge's own environment, to score one method's folder."""
    folder = Path(folder).resolve()
    prompts = list(read_json(folder / method / "prompts.json").values())
    runner, path = (shlex.quote(str(p)) for p in (folder / RUNNER, folder / method))
    return [vbench.shell_line(folder / method, vbench.in_suite(prompts)), f"python {runner} {path}"]


def read_visionreward(path: str | Path) -> dict[str, float]:
    """VisionReward's scores by file name; a list of {"video", "score"}, or an object of file name → score."""
    path = Path(path)
    data = read_json(path)
    pairs = _pairs(data)
    if not pairs:
        raise HeartError(
            f"{named(path)} holds no VisionReward scores: expected a list of objects with 'video' and 'score'"
        )
    return {name: vbench._score(value, name, path) for name, value in pairs}


def _pairs(data: Any) -> list[tuple[str, Any]]:
    if isinstance(data, dict):
        return [(str(name), value) for name, value in data.items()]
    entries = [e for e in data if isinstance(e, dict)] if isinstance(data, list) else []
    return [(str(e.get("video")), e.get("score")) for e in entries]


def attach_scores(results: dict, folder: str | Path, out: str | Path = ".") -> dict:
    """Add `vbench` (a method's score) and `visionreward` (each video's) to the rows from the judges' JSON in `folder`.

    `out` is the results folder: where the judges' videos still lie in `folder`, they must be the same.
    """
    results = json.loads(json.dumps(results))
    names = file_names(results["rows"])
    for row, name in zip(results["rows"], names):
        _check_same(Path(out) / row["video"], Path(folder) / row["method"] / VIDEOS / name)
    for method in {row["method"] for row in results["rows"]}:
        scores = vbench.read(Path(folder) / method / "vbench")
        reward = Path(folder) / method / "visionreward.json"
        rewards = read_visionreward(reward) if reward.is_file() else {}
        for row, name in zip(results["rows"], names):
            if row["method"] == method:
                row["vbench"] = scores["total"] if scores else None
                row["vbench_dimensions"] = {k: v for k, v in (scores or {}).items() if k != "total"}
                row["visionreward"] = rewards.get(name)
    if not any(row["vbench"] is not None or row["visionreward"] is not None for row in results["rows"]):
        raise HeartError(f"no judge's scores lie in {str(folder)!r}: run the commands that --judges prints first")
    results["empty"] = _empty(results["rows"])
    return results


def _empty(rows: list[dict]) -> dict[str, str]:
    """Why a judge's cell is empty, by column."""
    reasons = {}
    for key, name in (("vbench", "VBench"), ("visionreward", "VisionReward")):
        lacking = sorted({row["method"] for row in rows if row[key] is None})
        if lacking:
            reasons[key] = f"{name}: no scores for {', '.join(lacking)} (the judge has not been run there)."
    return reasons
