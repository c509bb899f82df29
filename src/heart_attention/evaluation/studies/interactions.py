"""How heads' errors add up: joint against additive error as heads are added, and cosines between heads' errors.

The paper's objective adds errors of single heads. If heads' errors in the velocity were orthogonal, the joint error
would be that sum; where they align, it is more. Measured at the shared threshold, on contexts of dense trajectories.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...calibration.measure import draws, probes, trajectory, velocity_error
from ...calibration.measure.candidates import DENSE, Spec
from ...calibration.measure.replay import Replay
from .common import save


def run(
    pipe: Any,
    control: Any,
    out: str | Path,
    call: dict[str, Any] | None = None,
    prompts: list[str] | None = None,
    backbone: Any = None,
    threshold: float = 0.9,
    contexts: int = 2,
    orders: int = 2,
    seed: int = 0,
    dense_steps: int = 5,
) -> dict[str, Any]:
    """Measure the trained model and, if given, the random-weight control; writes numbers, figure and paragraph.

    Args:
        call, prompts: how generations are made; None: the embedded model's quick size and its own prompts.
        backbone: None: the preset's for XAttention.
        contexts: (prompt, step) pairs.  orders: random orders in which heads are added.
    """
    from ... import tiny
    from ...presets import preset

    call, prompts = dict(call or tiny.QUICK), list(prompts or tiny.prompts("calibration")[:contexts])
    config = preset("xattention", pipe)
    spec = Spec.of(backbone or config.backbone, (threshold,), config.order, scale_clusters=config.scale_clusters)
    numbers: dict[str, Any] = {"threshold": threshold, "backbone": spec.points[0].backbone.to_dict(), "call": call}
    settings = (spec, call, prompts, contexts, orders, seed, dense_steps)
    numbers["trained"] = _measure(pipe, *settings)
    if control is not None:
        with control() as other:
            numbers["random"] = _measure(other, *settings)
    return save(out, "interactions", numbers, paragraph(numbers), lambda plt: _draw(plt, numbers))


def _measure(
    pipe: Any, spec: Spec, call: dict, prompts: list[str], contexts: int, orders: int, seed: int, dense_steps: int
) -> dict[str, Any]:
    steps = int(call.get("num_inference_steps", 50))
    drawn = draws.contexts(seed, "interactions", len(prompts), draws.strata(steps, "sparse", dense_steps), contexts)
    with Replay(pipe.transformer, pipe.scheduler) as replay:
        found = _record(pipe, replay, prompts, drawn, call, seed)
        each = [_context(replay, c, spec, orders, seed) for c in found]
    sizes = each[0]["sizes"]
    joint = np.mean([e["joint"] for e in each], axis=(0, 1))  # over contexts and orders, [sizes]
    additive = np.mean([e["additive"] for e in each], axis=(0, 1))
    return {
        "heads": sizes,
        "joint": joint.tolist(),
        "additive": additive.tolist(),
        "ratio": (joint / additive).tolist(),
        "ratio_by_context": [float(np.mean(e["joint"][:, -1] / e["additive"][:, -1])) for e in each],
        "cosine_within_layer": float(np.mean([e["within"] for e in each])),
        "cosine_between_layers": float(np.mean([e["between"] for e in each])),
        "contexts": [list(c) for c in drawn],
    }


def _record(pipe: Any, replay: Replay, prompts: list[str], drawn: list, call: dict, seed: int) -> list:
    found: dict[tuple[int, int], trajectory.Context] = {}
    for prompt in sorted({p for p, _ in drawn}):
        wanted = [s for p, s in drawn if p == prompt]
        trajectory.record(
            pipe, replay, prompt, prompts[prompt], wanted, call, seed, lambda c: found.update({(c.prompt, c.step): c})
        )
    return [found[at] for at in drawn]


def _context(replay: Replay, context: Any, spec: Spec, orders: int, seed: int) -> dict[str, Any]:
    """Isolated errors with their cosines, and joint errors of growing sets of heads."""
    layers, heads = len(replay.layers), int(replay.layers[0].module.heads)
    reference = context.reference()
    scale = velocity_error.denominator(reference)
    everything = {layer: range(heads) for layer in range(layers)}
    vectors = []  # W^½ε/‖y‖ of every head: its squared length is the head's error
    for _, _, velocity in probes.velocities(replay, context, everything, spec, 0):
        vectors.append(velocity_error.apply_sqrt((velocity - reference).double()).flatten().numpy() / np.sqrt(scale))
    gram = np.stack(vectors) @ np.stack(vectors).T  # [heads, heads]
    single, total = np.diag(gram), layers * heads
    sizes = sorted({1, 2, *(max(1, total * i // 8) for i in (1, 2, 4, 6)), total})
    joint, additive = np.zeros((orders, len(sizes))), np.zeros((orders, len(sizes)))
    for o in range(orders):
        order = draws.permutation(total, seed, "interactions order", o)
        for i, n in enumerate(sizes):
            if n == total and o:
                joint[o, i] = joint[0, i]
            else:
                joint[o, i] = _joint(replay, context, spec, order[:n], layers, heads, reference)
            additive[o, i] = single[order[:n]].sum()
    return {"sizes": sizes, "joint": joint, "additive": additive, **_cosines(gram, heads)}


def _joint(replay: Replay, context: Any, spec: Spec, chosen: list[int], layers: int, heads: int, reference) -> float:
    picked = {i: [0 if i * heads + h in set(chosen) else DENSE for h in range(heads)] for i in range(layers)}
    return velocity_error.spectral(probes.full_forward(replay, context, spec, picked), reference)


def _cosines(gram: np.ndarray, heads: int) -> dict[str, float]:
    length = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    cosine = gram / length / length[:, None]
    layer = np.arange(len(gram)) // heads
    same = layer[:, None] == layer
    other = ~np.eye(len(gram), dtype=bool)
    used = np.diag(gram) > 0
    both = used[:, None] & used
    within, between = cosine[same & other & both], cosine[~same & both]
    return {
        "within": float(within.mean()) if within.size else 0.0,
        "between": float(between.mean()) if between.size else 0.0,
    }


def paragraph(numbers: dict[str, Any]) -> str:
    """What the numbers say, computed from them."""
    trained = numbers["trained"]
    text = (
        f"At the shared threshold {numbers['threshold']} all {trained['heads'][-1]} heads together make "
        f"{trained['ratio'][-1]:.2f} times the sum of their single errors ({trained['ratio'][0]:.2f} for one head, "
        f"{trained['ratio'][len(trained['ratio']) // 2]:.2f} for {trained['heads'][len(trained['heads']) // 2]}). "
        f"The mean cosine between errors of two heads is {trained['cosine_within_layer']:+.3f} within a layer and "
        f"{trained['cosine_between_layers']:+.3f} between layers."
    )
    if "random" in numbers:
        control = numbers["random"]
        text += (
            f" With random weights the ratio is {control['ratio'][-1]:.2f}, the cosines {control['cosine_within_layer']:+.3f} "
            f"and {control['cosine_between_layers']:+.3f}."
        )
    more = trained["ratio"][-1] > 1.2
    verdict = (
        "the additive objective misses part of the joint error" if more else "single errors add up to the joint error"
    )
    return f"{text} So on this model {verdict}."


def _draw(plt: Any, numbers: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(5, 3.4))
    for name, colour in (("trained", "C0"), ("random", "C7")):
        if name in numbers:
            axis.plot(numbers[name]["heads"], numbers[name]["ratio"], "o-", color=colour, label=f"{name} weights")
    axis.axhline(1, color="k", lw=0.7, ls=":")
    axis.set_xlabel("heads that are sparse")
    axis.set_ylabel("joint error / sum of single errors")
    axis.legend(frameon=False)
    return figure
