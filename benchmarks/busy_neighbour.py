"""Speed-ups over dense on an idle machine and beside one busy neighbour, with libgomp's spinning as it is and shortened.

    python benchmarks/busy_neighbour.py [--spin default,1000,20000] [--size quick|native] [--rounds 5] [--threads 2] [--store]

Each line is a process of its own, because libgomp reads `GOMP_SPINCOUNT` once; the neighbour is a process that spins for as
long as it runs. Dense and sparse generations take turns, and the median counts. The bar: the speed-up of any method beside
the neighbour is within 15 % of the idle machine's. Only worth reading from a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from ratios import Ratio, add_arguments, settle

BAR = 0.15
METHODS = ("xattention+joint", "svg2+joint", "heart")
STEPS = {"quick": 10, "native": 8}


def medians(size: str, rounds: int, threads: int) -> dict[str, float]:
    """Seconds of a generation, dense and by each method, forced to be sparse."""
    import torch

    import heart_attention as heart
    from heart_attention import tiny
    from heart_attention.evaluation import methods

    torch.set_num_threads(threads)
    pipe = tiny.load()
    call = {**{"quick": tiny.QUICK, "native": tiny.NATIVE}[size], "num_inference_steps": STEPS[size]}
    built = {m: methods.build(m, pipe, "tiny", dense_steps=2, force_sparse=True).config for m in METHODS}

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(0)
        pipe("a red ball", generator=generator, output_type="latent", **call | {"num_inference_steps": steps})
        return time.perf_counter() - start

    found: dict[str, list[float]] = {name: [] for name in ("dense", *built)}
    for steps in (3, *[STEPS[size]] * rounds):  # the first round warms up
        found["dense"].append(seconds(steps))
        for name, config in built.items():
            with heart.enabled(pipe, config):
                found[name].append(seconds(steps))
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def measured(args: argparse.Namespace, spin: str, busy: bool) -> dict[str, float]:
    """`medians` of a process of its own, beside a neighbour if `busy`."""
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    env |= {"OMP_NUM_THREADS": str(args.threads)} | ({} if spin == "default" else {"GOMP_SPINCOUNT": spin})
    command = [sys.executable, __file__, "--child", "--size", args.size, "--rounds", str(args.rounds)]
    neighbour = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) if busy else None
    try:
        command += ["--threads", str(args.threads)]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()
    return json.loads(done.stdout.splitlines()[-1])


def lines(args: argparse.Namespace) -> list[Ratio]:
    """Print a line for each spin count and neighbour; the ratio of busy to idle speed-ups."""
    told = []
    for spin in args.spin.split(","):
        speed: dict[bool, dict[str, float]] = {}
        for busy in (False, True):
            found = measured(args, spin, busy)
            speed[busy] = {name: found["dense"] / found[name] for name in METHODS}
            shown = ", ".join(f"{name} {value:.2f}×" for name, value in speed[busy].items())
            print(f"spin {spin:>8}, {'busy' if busy else 'idle'}: dense {found['dense']:.2f} s, {shown}", flush=True)
        for name in METHODS:
            kept = speed[True][name] / speed[False][name]
            told.append(Ratio(f"{name}, {args.size}, spin {spin}", kept, "of the idle machine's speed-up"))
            print(f"  {name}: {kept:.2f} of the idle speed-up" + " BELOW" * (kept < 1 - BAR))
    return told


def main() -> None:
    """Measure, print and compare with what is stored."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spin", default="default,1000,20000", help="values of GOMP_SPINCOUNT")
    parser.add_argument("--size", choices=sorted(STEPS), default="quick")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    add_arguments(parser)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(medians(args.size, args.rounds, args.threads)))
        return
    settle("busy_neighbour", lines(args), args.store)


if __name__ == "__main__":
    main()
