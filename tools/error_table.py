"""Writes the table of docs/errors.md: every error sentence in the source, with what to do about it.

python tools/error_table.py            rewrite the table
python tools/error_table.py --check    exit 1 if it is not up to date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
START = "<!-- errors: made by tools/error_table.py -->"


def sentence(node: ast.expr) -> str | None:
    """The message of an error with … where a value goes, or None if it is not written out in place."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = sentence(node.left), sentence(node.right)
        return None if left is None or right is None else left + right
    return None


def errors() -> dict[str, list[str]]:
    """Sentences by file, in the order of the source."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "heart_attention").rglob("*.py")):
        tree = ast.parse(path.read_text())
        raised = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
        mine = [c for c in raised if getattr(c.func, "id", getattr(c.func, "attr", "")) == "HeartError" and c.args]
        texts = [sentence(c.args[0]) for c in sorted(mine, key=lambda c: c.lineno)]
        kept = list(dict.fromkeys(" ".join(t.split()) for t in texts if t and len(t.strip("…: ")) > 12))
        if kept:
            found[str(path.relative_to(ROOT / "src" / "heart_attention"))] = kept
    return found


def split(text: str) -> tuple[str, str]:
    """What is wrong, and what to do: the part after the last colon or semicolon."""
    at = max(text.rfind(": "), text.rfind("; "))
    return (text[:at], text[at + 2 :]) if at > 0 else (text, "the sentence says all there is")


def escaped(text: str) -> str:
    """As text of a Markdown table, without links or tags."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "&#91;")


def table() -> str:
    """The whole table as Markdown."""
    lines = []
    for name, texts in errors().items():
        lines += [f"\n### `{name}`\n", "| it says | do this |", "|---|---|"]
        lines += ["| " + " | ".join(map(escaped, split(text))) + " |" for text in texts]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table made anew."""
    head = PAGE.read_text().split(START)[0]
    return head + START + "\n" + table()


def main(argv: list[str]) -> int:
    """Write or check."""
    if "--check" in argv:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
