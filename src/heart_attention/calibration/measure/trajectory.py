"""Dense trajectories: what the transformer was given and what it answered at the sampled steps, kept on disk.

One pipeline run per prompt, untouched and dense, with the transformer's calls and the scheduler's steps
watched. A *context* is one (prompt, step): every forward's arguments (latents, timestep, conditioning), its
output, and how the sampler combined the outputs of the guidance branches into the velocity. Everything later
works on contexts alone, so a calibration can go on in another process or on another machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import HeartError
from ...files import read_json, write_atomic, write_json
from . import draws
from .replay import Replay

FIT = 0.02  # largest relative misfit of "velocity = weighted sum of the branches" (bfloat16 leaves about 0.005)


@dataclass(frozen=True)
class Branch:
    """One forward of the transformer at one step."""

    name: str
    inputs: dict[str, Any]  # keyword arguments of the forward: tensors and JSON values
    output: torch.Tensor
    weights: tuple[float, ...]  # of the equal chunks of the batch in the sampler's velocity; one unless CFG is batched


@dataclass(frozen=True)
class Context:
    """One (prompt, step) of a dense trajectory."""

    prompt: int
    step: int
    branches: tuple[Branch, ...]
    layout: str = "bcthw"  # of outputs: "bcthw", "btchw", or "b(thw)c:T,H,W"

    @property
    def name(self) -> str:
        """Short and unique within a calibration."""
        return f"p{self.prompt:03d}_s{self.step:03d}"

    def conditional(self) -> Context:
        """The same context with the velocity before guidance: the conditional branch alone."""
        best = max((w, i, j) for i, b in enumerate(self.branches) for j, w in enumerate(b.weights))
        _, i, j = best
        branch = self.branches[i]
        return replace(
            self, branches=(replace(branch, weights=tuple(float(n == j) for n in range(len(branch.weights)))),)
        )

    def combine(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sampler's velocity from the branches' outputs, fp32 [B, C, T, H, W]."""
        total = None
        for branch, output in zip(self.branches, outputs, strict=True):
            for weight, chunk in zip(branch.weights, output.float().chunk(len(branch.weights))):
                total = chunk * weight if total is None else total + chunk * weight
        assert total is not None
        return to_video(total, self.layout)

    def spread(self, cotangent: torch.Tensor) -> list[torch.Tensor]:
        """The adjoint of `combine`: what a cotangent [B, C, T, H, W] is for each branch's output."""
        flat = from_video(cotangent, self.layout)
        return [torch.cat([flat * w for w in b.weights]).to(b.output.dtype) for b in self.branches]

    def reference(self) -> torch.Tensor:
        """The dense velocity, fp32 [B, C, T, H, W]."""
        return self.combine([b.output for b in self.branches])

    def to(self, device: Any) -> Context:
        """The same on another device."""
        return replace(self, branches=tuple(_move(b, device) for b in self.branches))


def _move(branch: Branch, device: Any) -> Branch:
    inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in branch.inputs.items()}
    return replace(branch, inputs=inputs, output=branch.output.to(device))


def to_video(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A transformer's output as [B, C, T, H, W]."""
    if layout == "bcthw":
        return x
    if layout == "btchw":
        return x.transpose(1, 2)
    t, h, w = (int(n) for n in layout.split(":")[1].split(","))
    return x.unflatten(1, (t, h, w)).movedim(-1, 1)


def from_video(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of `to_video`."""
    if layout == "bcthw":
        return x
    if layout == "btchw":
        return x.transpose(1, 2)
    return x.movedim(1, -1).flatten(1, 3)


def layout_of(transformer: torch.nn.Module, inputs: Mapping[str, Any], output: torch.Tensor) -> str:
    """How this transformer lays out its output."""
    if output.ndim == 5:
        return "btchw" if type(transformer).__name__.startswith("CogVideoX") else "bcthw"
    grid = [inputs.get(name) for name in ("num_frames", "height", "width")]
    if output.ndim == 3 and all(isinstance(n, int) for n in grid):
        return "b(thw)c:" + ",".join(map(str, grid))
    raise HeartError(
        f"{type(transformer).__name__} returns a tensor of shape {tuple(output.shape)}, in which HEART does not "
        "know frames, height and width: calibrate a model with [B, C, T, H, W] velocities"
    )


# ---------------------------------------- how the sampler combines the branches


def fit_guidance(outputs: Sequence[torch.Tensor], velocity: torch.Tensor) -> list[tuple[float, ...]]:
    """Weights such that `velocity` is the weighted sum of the outputs' batch chunks (they add up to 1)."""
    chunks = [len(o) // len(velocity) for o in outputs]
    parts = [c.double().flatten() for o, n in zip(outputs, chunks) for c in o.chunk(max(n, 1))]
    if min(chunks) < 1 or any(p.numel() != velocity.numel() for p in parts):
        raise HeartError(
            f"the sampler's velocity of shape {tuple(velocity.shape)} does not come from outputs of shapes "
            f"{[tuple(o.shape) for o in outputs]}: calibrate with velocity 'cond'"
        )
    target = velocity.double().flatten()
    weights = _affine_fit(parts, target)
    rounded = [round(w, 4) for w in weights]  # guidance scales are short numbers; the fit has rounding noise
    for guess in (rounded, weights):
        misfit = target - sum(w * p for w, p in zip(guess, parts))
        if float(misfit.norm()) <= FIT * float(target.norm()):
            flat = iter(guess)
            return [tuple(next(flat) for _ in range(n)) for n in chunks]
    raise HeartError(
        "the sampler does not make its velocity as a weighted sum of the guidance branches (guidance rescale or "
        "another rule is on): switch that off or calibrate with velocity 'cond'"
    )


def _affine_fit(parts: list[torch.Tensor], target: torch.Tensor) -> list[float]:
    first, *others = parts
    if not others:
        return [1.0]
    directions = torch.stack([p - first for p in others], 1)  # [numel, parts - 1]
    solution = torch.linalg.lstsq(directions.T @ directions, directions.T @ (target - first)).solution
    tail = [float(x) for x in solution]
    return [1.0 - sum(tail), *tail]


# ---------------------------------------- recording


class _Watch:
    """Collects the forwards of one generation and cuts them into steps where the scheduler does.

    Under a cache (`layers` of attention are then counted) a wanted step at which half of the attention or less runs is
    measured at the next one that does run, or at the last.
    """

    def __init__(
        self,
        transformer: torch.nn.Module,
        wanted: set[int],
        keep: Callable[[Context], None],
        prompt: int,
        layers: int = 0,
    ):
        self.transformer, self.wanted, self.keep, self.prompt = transformer, wanted, keep, prompt
        self.step, self.name, self.layers = 0, "", layers
        self.calls: list[tuple[str, dict[str, Any], torch.Tensor]] = []  # branch, arguments, output
        self.attended = 0  # attention calls of this step
        self.due: list[int] = []  # wanted steps that a cache left out
        self.latest: Context | None = None  # of the last step that ran, under a cache

    def start(self, call: Any) -> None:
        self.name = str(call.branch)

    def after_forward(self, module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        if self.layers or self.step in self.wanted:
            self.calls.append((self.name, _named(self.transformer, args, kwargs), _first(output)))

    def attend(self, call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: Callable) -> torch.Tensor:
        """Dense attention, counted."""
        self.attended += 1
        return dense(q, k, v)

    def scheduler_step(self, velocity: torch.Tensor) -> None:
        if self.layers:
            self._under_a_cache(velocity)
        elif self.step in self.wanted and self.calls:
            self.keep(self._context(velocity))
        self.step, self.calls, self.attended = self.step + 1, [], 0

    @property
    def over(self) -> bool:
        """Whether nothing that is still to come is wanted."""
        return not self.layers and self.step > max(self.wanted)

    def _under_a_cache(self, velocity: torch.Tensor) -> None:
        if self.step in self.wanted and self.calls:
            self.due.append(self.step)
        if self.calls and 2 * self.attended > self.layers * len(self.calls):
            self.latest = self._context(velocity)
            self.settle()

    def settle(self) -> None:
        """Keep the latest context for all steps that wait for one."""
        if self.latest is not None:
            for step in self.due:
                self.keep(replace(self.latest, step=step))
            self.due = []

    def _context(self, velocity: torch.Tensor) -> Context:
        weights = fit_guidance([out for *_, out in self.calls], velocity)
        branches = tuple(
            Branch(name, {k: _storable(k, v) for k, v in inputs.items()}, out.detach().cpu().clone(), w)
            for (name, inputs, out), w in zip(self.calls, weights)
        )
        _, inputs, out = self.calls[0]
        return Context(self.prompt, self.step, branches, layout_of(self.transformer, inputs, out))


def _named(transformer: torch.nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """All arguments of a forward by name."""
    import inspect

    names = list(inspect.signature(type(transformer).forward).parameters)[1:]
    given = {**dict(zip(names, args)), **kwargs}
    return {k: v for k, v in given.items() if k != "return_dict"}


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output.sample


def _storable(name: str, value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().cpu().clone().contiguous()
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise HeartError(
            f"the pipeline hands {name}={type(value).__name__} to the transformer, which cannot be stored: "
            "calibrate without it"
        ) from None
    return value


@contextlib.contextmanager
def _watching(pipe: Any, replay: Replay, watch: _Watch) -> Iterator[None]:
    scheduler = pipe.scheduler
    original, overridden = scheduler.step, "step" in vars(scheduler)

    def step(model_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        watch.scheduler_step(model_output)
        if watch.over and hasattr(pipe, "interrupt"):
            pipe._interrupt = True  # diffusers' own way to end a generation: steps that are left do nothing
        return original(model_output, *args, **kwargs)

    hook = replay.transformer.register_forward_hook(watch.after_forward, with_kwargs=True)
    scheduler.step = step
    try:
        with replay.handler.watched(watch.start):
            yield
    finally:
        hook.remove()
        if getattr(pipe, "_interrupt", False):
            pipe._interrupt = False
        if overridden:
            scheduler.step = original
        else:
            del scheduler.step


def record(
    pipe: Any, replay: Replay, prompt: int, text: str, steps: Sequence[int], call: Mapping[str, Any], seed: int,
    keep: Callable[[Context], None], cached: bool = False,
) -> None:  # fmt: skip
    """Generate once, dense, and hand each wanted step's context to `keep`.

    `prompt` numbers the prompt `text`; `call` goes to the pipeline as it is; the start noise belongs to
    (seed, prompt) alone. `cached`: a cache is on, and steps that it leaves out are not measured. Nothing is computed after
    the last step that is wanted, where the pipeline can be interrupted.
    """
    wanted = {int(s) for s in steps}
    generator = torch.Generator("cpu").manual_seed(draws.torch_seed(seed, "noise", prompt))
    watch = _Watch(replay.transformer, set(wanted), keep, prompt, len(replay.layers) if cached else 0)
    with _watching(pipe, replay, watch), replay.handler.serving(watch.attend if cached else None), quiet(pipe):
        pipe(prompt=text, generator=generator, output_type="latent", **call)
    watch.settle()
    if watch.step <= max(wanted):
        raise HeartError(
            f"the pipeline took {watch.step} steps but step {max(wanted)} is to be measured: give the number of steps "
            "that it really takes"
        )


@contextlib.contextmanager
def quiet(pipe: Any) -> Iterator[None]:
    """Switch the pipeline's progress bar off inside the context."""
    before = dict(getattr(pipe, "_progress_bar_config", {}) or {})
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(**{**before, "disable": True})
    try:
        yield
    finally:
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(**before)


# ---------------------------------------- on disk


def to_bytes(context: Context) -> bytes:
    """A context as one safetensors file; the same context gives the same bytes."""
    from safetensors.torch import save

    tensors, branches = {}, []
    for i, b in enumerate(context.branches):
        tensors[f"{i}/output"] = b.output.contiguous()
        plain = {}
        for name, value in b.inputs.items():
            if torch.is_tensor(value):
                tensors[f"{i}/in/{name}"] = value.contiguous()
            else:
                plain[name] = value
        branches.append({"name": b.name, "weights": list(b.weights), "plain": plain})
    head = {"prompt": context.prompt, "step": context.step, "layout": context.layout, "branches": branches}
    return save(tensors, {"heart": json.dumps(head, sort_keys=True)})


def from_bytes(data: bytes) -> Context:
    """The inverse of `to_bytes`."""
    from safetensors.torch import load

    tensors = load(data)
    size = int.from_bytes(data[:8], "little")
    head = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["heart"])
    branches = []
    for i, b in enumerate(head["branches"]):
        prefix = f"{i}/in/"
        inputs = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)} | b["plain"]
        branches.append(Branch(b["name"], inputs, tensors[f"{i}/output"], tuple(b["weights"])))
    return Context(head["prompt"], head["step"], tuple(branches), head["layout"])


class Trajectories:
    """The contexts of a calibration in a folder: one file each, one list with checksums for each prompt."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._sums: dict[str, str] = {}

    def has(self, prompt: int, steps: Sequence[int]) -> bool:
        """Whether every step of the prompt is there, whole and unchanged."""
        try:
            listed = read_json(self._list(prompt))["files"]
            names = [_file(prompt, s) for s in sorted(set(steps))]
            if any(_sha((self.folder / n).read_bytes()) != listed[n] for n in names):
                return False
        except (HeartError, OSError, KeyError, TypeError):
            return False
        self._sums.update(listed)
        return True

    def write(self, prompt: int, contexts: Mapping[int, bytes]) -> None:
        """Store all contexts of a prompt; the list comes last, so that half a prompt counts as none."""
        files = {_file(prompt, s): _sha(data) for s, data in sorted(contexts.items())}
        for s, data in sorted(contexts.items()):
            write_atomic(self.folder / _file(prompt, s), data)
        write_json(self._list(prompt), {"files": files})
        self._sums.update(files)

    def read(self, prompt: int, step: int) -> bytes:
        """One context's bytes, checked."""
        name = _file(prompt, step)
        try:
            data = (self.folder / name).read_bytes()
        except OSError as error:
            raise HeartError(
                f"the context {self.folder / name} cannot be read ({error}): start again to redo it"
            ) from None
        if _sha(data) != self._sums.get(name):
            raise HeartError(f"the context {self.folder / name} was changed or damaged: start again to redo it")
        return data

    def _list(self, prompt: int) -> Path:
        return self.folder / f"p{prompt:03d}.json"


def _file(prompt: int, step: int) -> str:
    return f"p{prompt:03d}_s{step:03d}.safetensors"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
