"""Does the embedded model do what prompts say, and are its heads sparse? Figures and a contact sheet.

    python -m tools.train_tiny.evaluate check    --steps 50              # held-out prompts, native size
    python -m tools.train_tiny.evaluate check    --patterns 2 --seeds 3  # in two sentence patterns, with three seeds
    python -m tools.train_tiny.evaluate check    --model tiny-student    # likewise tiny-hunyuan
    python -m tools.train_tiny.evaluate check    --run runs/tiny ...     # a checkpoint, not the packaged weights
    python -m tools.train_tiny.evaluate controls --size quick            # guidance off
    python -m tools.train_tiny.evaluate density  --prompts 8             # trained and random weights
    python -m tools.train_tiny.evaluate timing                           # one dense generation, by part
    python -m tools.train_tiny.evaluate words                            # what a wrong word costs in loss
    python -m tools.train_tiny.evaluate shapes                           # what a wrong shape costs near the object
    python -m tools.train_tiny.evaluate noise    --prompts 8             # how far a little noise at the start carries

Each part adds its rows to the model's figures.json beside the weights, with the command's settings.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from heart_attention import tiny
from heart_attention.evaluation import pipelines
from heart_attention.evaluation.metrics.similarity import psnr
from heart_attention.evaluation.video import to_uint8
from heart_attention.tiny.scene import SHAPES, caption, splits

from . import attention
from .costs import wrong_shape_costs, wrong_word_costs
from .density import DensityMeter, over_video, watch_attention, wrap_attention
from .export import PACKAGE, load_run

SHEETS = Path(__file__).resolve().parents[2] / "docs" / "images"
# Of each model the file of its figures beside the weights, and its contact sheet.
FILES = {
    "tiny": ("figures.json", "tiny_contact_sheet.png"),
    "tiny-student": ("figures-student.json", "student_contact_sheet.png"),
    "tiny-hunyuan": ("figures-hunyuan.json", "hunyuan_contact_sheet.png"),
}
KEYS = ("background", "colour", "motion", "shape", "one_piece", "steady", "hole")  # of tiny.check
CHANGE = 0.01  # of the start noise
SIZES = ("native", "quick")


def generate(pipe, prompt: str, call: dict, seed: int = 0) -> np.ndarray:
    """Frames [T, H, W, 3] in 0..1."""
    call = {"output_type": "np", **call}
    return pipe(prompt, generator=torch.Generator().manual_seed(seed), **call).frames[0]


def call_for(pipe, size: str, steps: int | None = None, guidance: float | None = None) -> dict:
    """Arguments of a pipeline call at a named size."""
    call = pipelines.call_arguments(family_of(pipe), pipe, steps=steps, quick=size == "quick")
    return call if guidance is None else {**call, "guidance_scale": guidance}


def family_of(pipe) -> str:
    """The name that commands know such an embedded model by."""
    if hasattr(pipe.transformer, "single_transformer_blocks"):
        return "tiny-hunyuan"
    return "tiny-student" if pipelines.name_of(pipe) == "tiny-student" else "tiny"


def rates(checks: list[dict]) -> dict:
    """Means over clips of what ``tiny.check`` says, each over the clips that it applies to; `all`: the first three."""
    means = {}
    for key in KEYS:
        values = [c[key] for c in checks if c[key] is not None]
        means[key] = round(float(np.mean(values)), 4) if values else None
    means["all"] = float(np.mean([all(c[k] for k in KEYS[:3]) for c in checks]))
    variations = [c["seen"].get("variation") for c in checks]
    known = [v for v in variations if v is not None]
    means["variation"] = round(float(np.median(known)), 4) if known else None
    means["overlap"] = round(float(np.mean([c["seen"].get("overlap", 0.0) for c in checks])), 4)
    return means


def score(pipe, shown: list[str], asked: list[str], call: dict, seed: int = 0) -> tuple[dict, list[np.ndarray]]:
    """Generate for the `shown` prompts, seeds counting up from `seed`, and check against the `asked` ones."""
    clips = [generate(pipe, p, call, seed=seed + i) for i, p in enumerate(shown)]
    checks = [tiny.check(c, p) for c, p in zip(clips, asked, strict=True)]
    failures = [
        {"prompt": p, "seen": {k: c["seen"][k] for k in ("background", "colour", "motion")}}
        for p, c in zip(asked, checks, strict=True)
        if not (c["background"] and c["colour"] and c["motion"])
    ]
    by_shape = {
        shape: rates([c for c, p in zip(checks, asked, strict=True) if shape in p])["shape"]
        for shape in SHAPES
        if any(shape in p for p in asked)
    }
    return {**rates(checks), "shape_by_word": by_shape, "prompts": len(shown), "failures": failures}, clips


def contact_sheet(clips: list[np.ndarray], prompts: list[str], path: Path, columns: int = 3, frames: int = 4) -> None:
    """One strip of frames a prompt, the prompt above it."""
    height, width = clips[0].shape[1:3]
    gap, label = 8, 14
    cell = (frames * width + gap, height + label + gap)
    rows = -(-len(clips) // columns)
    sheet = Image.new("RGB", (columns * cell[0] + gap, rows * cell[1] + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (clip, prompt) in enumerate(zip(clips, prompts, strict=True)):
        x, y = gap + i % columns * cell[0], gap + i // columns * cell[1]
        draw.text((x, y), prompt, fill="black")
        picks = np.linspace(0, len(clip) - 1, frames).round().astype(int)
        strip = np.concatenate([clip[t] for t in picks], axis=1)
        sheet.paste(Image.fromarray((strip * 255).round().astype(np.uint8)), (x, y + label))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(colors=256).save(path, optimize=True)


def measure_density(pipe, prompts: list[str], call: dict, warmup: int = 5, stride: int = 1) -> dict:
    """Mean density by XAttention's rule over heads, steps after warm-up, both guidance branches and prompts."""
    grid = tiny.tokens(**call)
    layers = sum(len(blocks) for blocks in pipe.transformer.children() if isinstance(blocks, torch.nn.ModuleList))
    steps = set(range(warmup, call["num_inference_steps"], stride))
    tables = {"raster": [], "tiles": []}
    for i, prompt in enumerate(prompts):
        meter = DensityMeter(layers, grid, steps, branches=2 if call.get("guidance_scale", 1.0) > 1 else 1)
        with watch_attention(meter.see, int(np.prod(grid))):
            generate(pipe, prompt, {**call, "output_type": "latent"}, seed=i)
        for order in tables:
            tables[order].append(meter.table(order))
    result = {"prompts": len(prompts), "steps": sorted(steps), "tokens": int(np.prod(grid))}
    for order, found in tables.items():
        heads = torch.stack(found).mean(0)  # [L, H]
        result[order] = {
            "mean": round(heads.mean().item(), 4),
            "lowest": round(heads.min().item(), 4),
            "highest": round(heads.max().item(), 4),
            "heads": [[round(v, 3) for v in row] for row in heads.tolist()],
        }
    return result


def measure_time(pipe, call: dict) -> dict:
    """Seconds of one dense generation and the share of denoising spent in video self-attention."""
    spent, tokens = {"attention": 0.0}, int(np.prod(tiny.tokens(**call)))

    def wrap(original):
        def timed(query, key, value, *args, **kwargs):
            begin = time.perf_counter()
            out = original(query, key, value, *args, **kwargs)
            if over_video(query, key, tokens):
                spent["attention"] += time.perf_counter() - begin
            return out

        return timed

    with wrap_attention(wrap):
        begin, cpu = time.perf_counter(), time.process_time()
        generate(pipe, tiny.prompts("demo")[0], call)
        total, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {
        "seconds": round(total, 1),
        "cpu_seconds": round(cpu, 1),  # steadier than seconds where the machine is shared
        "attention_seconds": round(spent["attention"], 1),
        "attention_share": round(spent["attention"] / total, 3),
        "threads": torch.get_num_threads(),
        "steps": call["num_inference_steps"],
    }


def noise_psnr(pipe, prompt: str, call: dict, seed: int = 0, change: float = CHANGE) -> float:
    """PSNR between a clip and the one from a start noise of which a share is other noise: what chance alone may do."""
    rng = torch.Generator().manual_seed(seed)
    time, height, width = tiny.tokens(**call)
    shape = (1, pipe.transformer.config.in_channels, time, 2 * height, 2 * width)
    noise, other = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    changed = (noise + change * other) / (1 + change**2) ** 0.5
    one, two = (generate(pipe, prompt, {**call, "latents": latents}) for latents in (noise, changed))
    return psnr(to_uint8(two), to_uint8(one))


def record(name: str, row: dict, path: Path) -> None:
    """Put a row into a file of figures."""
    figures = json.loads(path.read_text()) if path.exists() else {}
    figures[name] = row
    path.write_text(json.dumps(figures, indent=1) + "\n")


def held_out(args) -> list[str]:
    """The held-out prompts that were asked for: in every sentence pattern, as often as there are seeds."""
    combos = splits()["heldout"][: args.prompts or 24]
    return [caption(c, template=t) for _ in range(args.seeds) for t in range(args.patterns) for c in combos]


def run_check(pipe, args, call: dict) -> None:
    """Held-out prompts as they are; then the same clips, each checked against another prompt than its own."""
    prompts = held_out(args)
    found, clips = score(pipe, prompts, prompts, call)
    contact_sheet(clips[:24], prompts[:24], args.sheet)
    record("check", {**found, "call": call}, args.figures)
    others = prompts[7:] + prompts[:7]
    shuffled = rates([tiny.check(c, p) for c, p in zip(clips, others, strict=True)])
    record("shuffled_prompts", {**shuffled, "prompts": len(prompts), "call": call}, args.figures)


def run_controls(pipe, args, call: dict) -> None:
    """Guidance off."""
    prompts = tiny.prompts("heldout")[: args.prompts or 24]
    call = {**call, "guidance_scale": 1.0}
    found, _ = score(pipe, prompts, prompts, call)
    record("guidance_off", {**found, "call": call}, args.figures)


def run_density(pipe, args, call: dict) -> None:
    """Head densities of the trained weights and of the random control."""
    prompts = tiny.prompts("heldout")[: args.prompts or 8]
    record("density", measure_density(pipe, prompts, call, args.warmup, args.stride), args.figures)
    control = measure_density(pipelines.load(f"{family_of(pipe)}-random"), prompts[:2], call, args.warmup, args.stride)
    record("density_random", control, args.figures)


def run_timing(pipe, args, call: dict) -> None:
    """Seconds of a dense generation."""
    record("timing", measure_time(pipe, call), args.figures)


def run_words(pipe, args, call: dict) -> None:
    """What wrong words cost; new clips of the training world, at a small size."""
    record("wrong_words", wrong_word_costs(pipe), args.figures)


def run_shapes(pipe, args, call: dict) -> None:
    """What a wrong shape costs near the object."""
    record("wrong_shapes", wrong_shape_costs(pipe), args.figures)


def run_noise(pipe, args, call: dict) -> None:
    """PSNR under a changed start noise, clip by clip."""
    prompts = tiny.prompts("heldout")[: args.prompts or 8]
    found = sorted(round(noise_psnr(pipe, prompt, call, seed), 2) for seed, prompt in enumerate(prompts))
    row = {"change": CHANGE, "mean": round(float(np.mean(found)), 2), "psnr": found, "call": call}
    record("noise", row, args.figures)


PARTS = {
    "check": run_check, "controls": run_controls, "density": run_density, "timing": run_timing, "words": run_words,
    "shapes": run_shapes, "noise": run_noise,
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", choices=tuple(FILES), default="tiny", help="embedded model")
    parser.add_argument("--size", choices=SIZES, default="native")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts", type=int, help="how many; the part's own number by default")
    parser.add_argument("--patterns", type=int, default=1, choices=(1, 2, 3), help="sentence patterns")
    parser.add_argument("--seeds", type=int, default=1, help="clips of each sentence")
    parser.add_argument("--run", type=Path, help="folder of a checkpoint to take instead of the packaged weights")
    parser.add_argument(
        "--raw", action="store_true", help="of the checkpoint the weights themselves, not their average"
    )
    parser.add_argument("--quick", action="store_true", help="compute in bfloat16, for a look on the way")
    parser.add_argument("--warmup", type=int, default=5, help="first step whose density counts")
    parser.add_argument("--stride", type=int, default=1, help="measure density at every n-th step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--figures", type=Path, help="default: the model's own file in the package")
    parser.add_argument("--sheet", type=Path, help="default: the model's own picture in the docs")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    pipe = pipelines.load(args.model) if args.run is None else load_run(args.run, averaged=not args.raw)
    if args.quick:
        attention.quicken(pipe.transformer)
    figures, sheet = FILES[family_of(pipe)]
    args.figures, args.sheet = args.figures or PACKAGE / figures, args.sheet or SHEETS / sheet
    PARTS[args.part](pipe, args, call_for(pipe, args.size, args.steps))


if __name__ == "__main__":
    main()
