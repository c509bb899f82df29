"""Results files: what is written is read back; whatever is odd is one sentence."""

import json
import random

import pytest

from heart_attention import HeartError
from heart_attention.evaluation import results, tables

ROW = {"method": "dense", "prompt": "p", "seed": 0, "attention_s": 1.0, "total_s": 2.0, "density": None, "refresh_rate": None,
       "video": "videos/a.mp4", "parts_s": {"attention": 1.0}, "steps_s": [0.1], "psnr": None}  # fmt: skip


def write(folder, **changes):
    whole = {"schema": results.SCHEMA, "provenance": {}, "conventions": {"psnr": "usual"}, "rows": [{**ROW, **changes}]}
    (folder / results.FILE).write_text(json.dumps(whole))


def test_a_good_file_is_read(tmp_path):
    write(tmp_path)
    assert results.load(tmp_path)["rows"] == [ROW]


@pytest.mark.parametrize("content, sentence", [("{}", "schema"), ("[1", "not valid JSON")])
def test_a_bad_results_file_is_refused(tmp_path, content, sentence):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(HeartError, match=sentence):
        results.load(tmp_path)


@pytest.mark.parametrize("changes, sentence", [
    ({"attention_s": "fast"}, "attention_s is 'fast'"),
    ({"total_s": -1.0}, "below 0"),
    ({"total_s": 1e300}, "total_s is 1e"),
    ({"seed": True}, "seed is True"),
    ({"psnr": [1]}, "psnr is"),
    ({"parts_s": {"attention": "x"}}, "parts_s is"),
    ({"video": "../secret.mp4"}, "outside the folder"),
    ({"stats": "/etc/passwd"}, "outside the folder"),
    ({"prompt": "x" * 200_000}, "prompt is"),
])  # fmt: skip
def test_odd_rows_are_told_by_field(tmp_path, changes, sentence):
    write(tmp_path, **changes)
    with pytest.raises(HeartError, match=sentence) as told:
        results.load(tmp_path)
    assert len(str(told.value)) <= 300


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "r" / "a.mp4").symlink_to(tmp_path / "secret")
    assert not results.inside(tmp_path / "r", "a.mp4") and results.inside(tmp_path / "r", "b.mp4")


ODD = (None, True, -1, 0, 1e308, "", "x", "\x1b[2J", [], [[]], {}, {"a": {}}, [None], "../x", 10**30)


def test_hostile_rows_never_raise_anything_else(tmp_path):
    chance = random.Random(0)
    for _ in range(300):
        row = {**ROW, **{k: chance.choice(ODD) for k in chance.sample([*ROW, "strip", "spread", "reference_s"], 2)}}
        whole = {"schema": results.SCHEMA, "provenance": {}, "conventions": chance.choice(({"psnr": "u"}, {}, ODD[5])),
                 "rows": [row, ROW]}  # fmt: skip
        (tmp_path / results.FILE).write_text(json.dumps(whole))
        try:
            tables.text_table(tables.summarise(results.load(tmp_path)))
        except HeartError as error:
            assert len(str(error)) <= 300
