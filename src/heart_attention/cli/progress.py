"""How far the work is, on standard error: a bar on a terminal, few lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any


class Steps:
    """A progress bar over denoising steps of all methods, on a terminal only; `total` 0: unknown."""

    def __init__(self, total: int = 0) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total or None, unit="step", file=sys.stderr, dynamic_ncols=True, disable=None)

    def __call__(self, method: str, steps: int) -> None:
        """Move on by some steps of a method."""
        self.bar.set_description(method, refresh=False)
        self.bar.update(steps)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()


class Stages:
    """How far each stage is and the time left: a bar on a terminal, a line at every tenth elsewhere."""

    def __init__(self, file: Any = None) -> None:
        self.file = sys.stderr if file is None else file
        self.bar: Any = None
        self.stage, self.tenth = "", -1

    def __call__(self, stage: str, done: int, total: int, left: float | None) -> None:
        """Show that so many of a stage's tasks are done; `left` in seconds, None if unknown."""
        rest = "" if left is None or done >= total else f"{clock(left)} left"
        if stage != self.stage:
            self.close()
            self.stage, self.tenth = stage, -1
        if self.file.isatty():
            self._draw(stage, done, total, rest)
        elif (tenth := 10 if done >= total else 10 * done // total) > self.tenth:
            self.tenth = tenth
            print(f"{stage}: {done}/{total}, {10 * tenth}%{rest and ', ' + rest}", file=self.file, flush=True)

    def _draw(self, stage: str, done: int, total: int, rest: str) -> None:
        from tqdm import tqdm

        if self.bar is None or self.bar.total != total:
            self.close()
            self.stage = stage
            form = "{desc:<28} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
            self.bar = tqdm(total=total, desc=stage, initial=done, file=self.file, bar_format=form)
        self.bar.n = done
        self.bar.set_postfix_str(rest, refresh=False)
        self.bar.refresh()

    def close(self) -> None:
        """End the present bar."""
        if self.bar is not None:
            self.bar.close()
        self.bar, self.stage = None, ""


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 4:05."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
