"""What heads chose, as a table and as a picture."""

from calibrations_for_tests import points_calibration

from heart_attention import Calibration
from heart_attention.calibration import choices, show
from heart_attention.cli import main


def test_choices_count_every_head_once_in_every_phase(tmp_path):
    made = Calibration.load(points_calibration(tmp_path / "p.heart.json", phases=3))
    rows = choices.choices(made)
    for phase in range(3):
        assert sum(row["heads"][phase] for row in rows) == made.layers * made.heads
    table = choices.markdown(made)
    assert "| phase 2 |" in table and table.count("\n") >= len(rows) + 2


def test_the_picture_has_a_colour_for_every_point(tmp_path):
    made = Calibration.load(points_calibration(tmp_path / "p.heart.json", phases=2))
    assert len({tuple(c) for c in choices.colours(made).tolist()}) == len(made.points)
    assert show.picture(made, tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_prints_them(tmp_path, capsys):
    assert main.main(["show", points_calibration(tmp_path / "p.heart.json"), "--choices"]) == 0
    assert capsys.readouterr().out.startswith("| backbone | order | rest | threshold | phase 0 | phase 1 |")
