"""Times the exact calibration solver on tables of several sizes and kinds: seconds, certified gap, proved or not.

    python benchmarks/solver.py [--repeat 3] [--json]

Bars: 1,600 heads × 3 candidates in 0.2 s, × 100 in 5 s, 6,400 × 40 (four phases of different length) in 10 s, proved.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from heart_attention.calibration.solve import solver

SIZES = ((24, 7), (360, 3), (1600, 3), (1600, 7), (1600, 100), (6400, 40))
KINDS = ("measured-like", "noisy", "tied", "proportional")


def table(kind: str, heads: int, candidates: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Errors, sparsities and thresholds of one made-up calibration."""
    rng = np.random.default_rng(seed)
    tau = np.linspace(0.6, 0.98, candidates) if candidates > 3 else np.array([0.85, 0.9, 0.95])
    tau[np.abs(tau - 0.9).argmin()] = 0.9
    sharp = rng.lognormal(0, 0.7, (heads, 1))
    S = (1 - tau) ** (0.3 + 0.4 * rng.random((heads, 1))) * (0.6 + 0.4 * rng.random((heads, 1)))
    E = rng.lognormal(-16, 2, (heads, 1)) * (1 - tau) ** (1.5 + sharp)
    if kind == "noisy":  # not monotone, as single draws of prompt and step make it
        E, S = E * rng.lognormal(0, 0.5, E.shape), np.clip(S + 0.02 * rng.standard_normal(S.shape), 0, 1)
    elif kind == "tied":
        E, S = 10.0 ** np.round(np.log10(E)), np.round(S, 2)
    elif kind == "proportional":  # every choice on one line: subset sums, the worst case
        E = 1e-6 * S
    return E, S, tau


def phase_shares(heads: int) -> np.ndarray | None:
    """How much rows count: for 6,400 of them four phases of 12, 11, 11 and 11 steps, else all alike."""
    return np.repeat([12.0, 11.0, 11.0, 11.0], heads // 4) if heads == 6400 else None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    solver.solve(*table("noisy", 60, 7, 0)[:2], min_sparsity=0.3)  # the first call pays for numpy's own start
    rows = []
    for heads, candidates in SIZES:
        for kind in KINDS:
            runs, cpu = [], []
            for seed in range(args.repeat):
                E, S, tau = table(kind, heads, candidates, seed)
                begin = time.process_time()
                runs.append(solver.solve(E, S, thresholds=tau, shared=0.9, shares=phase_shares(heads)))
                cpu.append(time.process_time() - begin)
            rows.append(
                {
                    "heads": heads,
                    "candidates": candidates,
                    "kind": kind,
                    "seconds_median": sorted(r.seconds for r in runs)[len(runs) // 2],
                    "cpu_seconds_median": sorted(cpu)[len(cpu) // 2],
                    "relative_gap_worst": max(r.gap / r.objective for r in runs),
                    "proven": sum(r.proven for r in runs),
                    "of": args.repeat,
                }
            )
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'heads':>6} {'cand.':>6} {'kind':<14} {'seconds':>9} {'CPU s':>7} {'rel. gap':>9}  optimum proved")
    for r in rows:
        print(
            f"{r['heads']:>6} {r['candidates']:>6} {r['kind']:<14} {r['seconds_median']:>9.3f} "
            f"{r['cpu_seconds_median']:>7.3f} "
            f"{r['relative_gap_worst']:>9.1e}  {r['proven']}/{r['of']}"
        )


if __name__ == "__main__":
    main()
