"""How far the work is: a bar on a terminal, few lines elsewhere."""

import io

import pytest

from heart_attention.cli import progress


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65.4, "1:05"), (3723, "1:02:03")])
def test_clock(seconds, text):
    assert progress.clock(seconds) == text


def test_progress_off_a_terminal_is_a_few_lines():
    lines = io.StringIO()
    shown = progress.Stages(lines)
    for done in range(101):
        shown("probes", done, 100, 100.0 - done)
    shown("verifying", 2, 2, 0.0)
    shown.close()
    told = lines.getvalue().splitlines()
    assert told[0] == "probes: 0/100, 0%, 1:40 left" and told[10] == "probes: 100/100, 100%"
    assert told[11:] == ["verifying: 2/2, 100%"]


def test_progress_on_a_terminal_is_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    shown = progress.Stages(screen)
    shown("probes", 0, 4, None)
    shown("probes", 3, 4, 61.0)
    shown("verifying", 1, 1, 0.0)
    shown.close()
    assert "3/4" in screen.getvalue() and "1:01 left" in screen.getvalue() and "verifying" in screen.getvalue()
