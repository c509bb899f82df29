"""How many random examples a test takes: all with HEART_THOROUGH=1 (`make test-all`), else a third of them."""

import os

THOROUGH = os.environ.get("HEART_THOROUGH", "0") not in ("", "0")


def examples(count: int) -> int:
    """`count` in a thorough run; a third of it, but five at least, in a quick one."""
    return count if THOROUGH else min(count, max(5, count // 3))
