#!/usr/bin/env python3
"""Scores a folder of videos with VisionReward; run it in VisionReward's own environment. It needs nothing of HEART.

    cd VisionReward                                  # the checkout, with its weights as its README says
    python DIR/visionreward_scores.py DIR/METHOD     # writes DIR/METHOD/visionreward.json

VisionReward has no command for a folder: its `inference-video.py` offers `score(video_path, prompt) -> float`, which this
script calls for every video that METHOD/prompts.json names. It writes after each video, and goes on where it was stopped.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
from pathlib import Path


def load_judge(script):
    """The function `score` of VisionReward's script, which loads its model when it is imported."""
    spec = importlib.util.spec_from_file_location("visionreward_inference", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def score_folder(folder, score, out, say=print):
    """Score what is missing of {file in videos/: prompt} in `folder`/prompts.json; the list that was written to `out`."""
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    done = {e["video"]: e for e in json.loads(out.read_text())} if out.is_file() else {}
    for i, (name, prompt) in enumerate(prompts.items()):
        if name not in done:
            value = float(score(str(folder / "videos" / name), prompt))
            if not math.isfinite(value):
                raise SystemExit(f"VisionReward gave {value} for {name}: check the video")
            done[name] = {"video": name, "prompt": prompt, "score": value}
            part = out.with_suffix(".part")
            part.write_text(json.dumps(list(done.values()), indent=1), encoding="utf-8")
            os.replace(part, out)
        say(f"{i + 1}/{len(prompts)} {name}: {done[name]['score']:.4f}")
    return list(done.values())


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="one method's folder, with prompts.json")
    parser.add_argument("--script", default="inference-video.py", help="VisionReward's script (default: here)")
    parser.add_argument("--out", type=Path, help="default: visionreward.json in the folder")
    args = parser.parse_args(arguments)
    for path in (args.folder / "prompts.json", Path(args.script)):
        if not path.is_file():
            sys.exit(
                f"there is no {path}: run this in VisionReward's checkout, with a folder of `heart compare --judges`"
            )
    score_folder(args.folder, load_judge(args.script), args.out or args.folder / "visionreward.json")


if __name__ == "__main__":
    main()
