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

THRESHOLD = 0.9
CONTEXTS, ORDERS = 2, 2  # (prompt, step) pairs; random orders in which heads are added
DENSE_STEPS = 5


def plan(call: dict, prompts: list[str], seed: int, control: bool) -> list[tuple[int, dict]]:
    """The drawn (prompt, step) pairs, the same ones for the control."""
    intervals = draws.strata(call["num_inference_steps"], "sparse", min(DENSE_STEPS, call["num_inference_steps"] - 1))
    count = min(CONTEXTS, len(prompts) * sum(b - a + 1 for a, b in intervals))
    drawn = draws.contexts(seed, "interactions", len(prompts), intervals, count)
    return [(prompt, {"call": call, "step": step, "orders": ORDERS, "seed": seed}) for prompt, step in drawn]


def measure(pipe: Any, text: str, prompt: int, call: dict, step: int, orders: int, seed: int) -> dict:
    """One context: isolated errors with their cosines, joint errors of growing sets of heads."""
    from ...presets import preset

    config = preset("xattention", pipe)
    spec = Spec.of(config.backbone, (THRESHOLD,), config.order, scale_clusters=config.scale_clusters)
    kept: list[trajectory.Context] = []
    with Replay(pipe.transformer, pipe.scheduler) as replay:
        trajectory.record(pipe, replay, prompt, text, [step], call, seed, kept.append)
        found = _context(replay, kept[0], spec, orders, seed)
    numbers = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}
    return {**numbers, "context": [prompt, step], "backbone": spec.points[0].backbone.to_dict()}


def run(trained: list[dict], control: list[dict] | None, out: str | Path, seed: int = 0) -> dict[str, Any]:
    """Numbers, figure and paragraph of the trained model and, if given, the random-weight control."""
    numbers: dict[str, Any] = {"threshold": THRESHOLD, "backbone": trained[0]["backbone"], "trained": _summary(trained)}
    if control is not None:
        numbers["random"] = _summary(control)
    return save(out, "interactions", numbers, paragraph(numbers), lambda plt: _draw(plt, numbers))


def _summary(each: list[dict]) -> dict[str, Any]:
    joint, additive = (np.array([e[name] for e in each]) for name in ("joint", "additive"))  # [contexts, orders, sizes]
    mean_joint, mean_additive = joint.mean((0, 1)), additive.mean((0, 1))
    return {
        "heads": each[0]["sizes"],
        "joint": mean_joint.tolist(),
        "additive": mean_additive.tolist(),
        "ratio": (mean_joint / mean_additive).tolist(),
        "ratio_by_context": (joint[..., -1] / additive[..., -1]).mean(1).tolist(),
        "cosine_within_layer": float(np.mean([e["within"] for e in each])),
        "cosine_between_layers": float(np.mean([e["between"] for e in each])),
        "contexts": [e["context"] for e in each],
    }


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
