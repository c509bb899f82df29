"""Results folders that somebody tampered with: a page or one sentence, never anything else."""

import copy
import json
import os
import random
import xml.etree.ElementTree

import numpy as np
import pytest

from heart_attention import HeartError
from heart_attention.evaluation import results, video
from heart_attention.evaluation.frontier import plot
from heart_attention.evaluation.report import picture, report

ODD = (
    None,
    True,
    -1,
    0,
    1e308,
    1e-300,
    "",
    "\x1b[2J",
    "<script>",
    [],
    [[]],
    {},
    {"a": {}},
    [None],
    "../x",
    10**30,
    "\ud800",
    [1, "a"],
)
RECORD = {"branch": "cond", "steps": [0, 1], "dense": [[True, False]], "density": [[[1.0, 1.0], [0.5, 0.2]]],
          "refreshed": [[[0.0, 0.0], [1.0, 1.0]]]}  # fmt: skip
STATS = {"config": {"_data": {"thresholds": 0.9}}, "records": [RECORD]}


def row(method):
    return {"method": method, "prompt": "p", "seed": 0, "attention_s": 1.0, "total_s": 2.0, "density": 0.5, "refresh_rate": 0.5,
            "psnr": None if method == "dense" else 30.0, "video": "v.mp4", "stats": "s.json", "parts_s": {"attention": 1.0},
            "steps_s": [0.1] * 4, "reference_steps_s": [0.2] * 4, "reference_s": {"attention_s": 1.0, "total_s": 2.0},
            "spread": 0.1, "dense_reasons": {"x": 1}, "dense_share": 0.2}  # fmt: skip


def places(value, path=()):
    """Paths to everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


def tampered(value, chance):
    """The value with one to three parts removed or replaced."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        *path, last = chance.choice(list(places(value)))
        parent = value
        for key in path:
            parent = parent[key]
        if chance.random() < 0.2:
            parent.pop(last)
        else:
            parent[last] = copy.deepcopy(chance.choice(ODD))
    return value


def folder_with(tmp_path, **changes):
    """A results folder whose rows have these fields."""
    for name in ("v.mp4", "s.json"):
        (tmp_path / name).write_text(json.dumps(STATS))
    rows = [{**row(method), **changes} for method in ("dense", "xattention")]
    whole = {"schema": "heart-results/1", "provenance": {}, "conventions": {"psnr": "u"}, "rows": rows}
    (tmp_path / "results.json").write_text(json.dumps(whole))
    return tmp_path


@pytest.mark.parametrize("name", ["a" * 5000, "a/" * 5000, f"{'b' * 200}/{'c' * 200}", "\x1b[2J"])
@pytest.mark.parametrize("field", ["video", "stats", "strip"])
def test_files_names_of_any_length(tmp_path, field, name):
    try:
        report(folder_with(tmp_path, **{field: name}))
    except HeartError as error:
        assert len(str(error)) <= 300 and str(error).isprintable()
    else:
        assert field != "video" and len(name) < 5000


def test_a_video_of_gigabytes_is_not_read(tmp_path):
    folder = folder_with(tmp_path)
    os.truncate(folder / "v.mp4", 20 << 30)  # a hole: it takes no space
    with pytest.raises(HeartError, match="a page holds at most"):
        report(folder)


def test_videos_of_different_length_are_no_animation(tmp_path):
    for name, count in (("a.mkv", 4), ("b.mkv", 2)):
        video.write_lossless(tmp_path / name, np.zeros((count, 16, 16, 3), np.uint8))
    folder = folder_with(tmp_path, lossless="a.mkv")
    whole = json.loads((folder / "results.json").read_text())
    whole["rows"][1]["lossless"] = "b.mkv"
    (folder / "results.json").write_text(json.dumps(whole))
    with pytest.raises(HeartError, match=r"have 4, 2 frames"):
        picture.animation(folder, tmp_path / "a.gif")


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "\x1b[2J"])
def test_a_picture_is_xml_whatever_methods_are_called(tmp_path, name):
    folder = folder_with(tmp_path, method=name)
    for path in (picture.front(folder, tmp_path / "a.svg"), plot.write(results.load(folder), tmp_path / "b.svg")):
        assert xml.etree.ElementTree.fromstring(path.read_bytes()).tag.endswith("svg")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_page_or_one_sentence(tmp_path, seed):
    video.write_mp4(tmp_path / "v.mp4", np.zeros((4, 16, 16, 3), np.uint8))
    good = {"schema": "heart-results/1", "provenance": {"machine": "t", "configs": {"a": {}}}, "conventions": {"psnr": "u"},
            "rows": [row("dense"), row("xattention+heart")], "empty": {"vbench": "x"}}  # fmt: skip
    chance, told = random.Random(seed), 0
    for i in range(60):
        results, stats = (tampered(good, chance), STATS) if i % 3 else (good, tampered(STATS, chance))
        (tmp_path / "results.json").write_text(json.dumps(results))
        (tmp_path / "s.json").write_text(json.dumps(stats))
        try:
            assert "<script>" not in report(tmp_path).read_text().split("<script>\n")[0]
        except HeartError as error:
            told += 1
            assert len(str(error)) <= 300
    assert told > 10
