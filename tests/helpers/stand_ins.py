"""Stand-ins for libraries that tests need not install: what each does to a model, and nothing else of it.

`make test-all` runs the same tests with the libraries themselves.
"""

from __future__ import annotations

import functools
import pickle
import unittest.mock
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

PROJECTIONS = ("to_q", "to_k", "to_v")


# -- peft: a projection becomes a module that holds it as `base_layer` and adds two small matrices -----------
class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def lora(model: nn.Module, rank: int = 2) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        _replace(model, lambda name, layer: Adapted(layer, rank) if name.endswith(PROJECTIONS) else layer)


# -- quanto: every linear layer keeps its weight as int8 numbers and a scale ----------------------------------
class Int8Linear(nn.Module):
    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((layer.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def int8(model: nn.Module) -> None:
    _replace(model, lambda name, layer: Int8Linear(layer))


def _replace(model: nn.Module, new: Any) -> None:
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new(name, layer))


# -- cache-dit: during a forward one module stands in the place of all blocks, and may leave most of them out --
class CachedBlocks(nn.Module):
    """Runs the first block; the others only at even forwards of a branch, else their last change is added again."""

    def __init__(self, blocks: nn.ModuleList, branches: int):
        super().__init__()
        self.transformer_blocks, self.branches = blocks, branches
        self.forwards, self.changes = 0, {}

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        branch, number = self.forwards % self.branches, self.forwards // self.branches
        self.forwards += 1
        first = self.transformer_blocks[0](hidden_states, *args, **kwargs)
        if number % 2:
            return first + self.changes[branch]
        out = first
        for block in self.transformer_blocks[1:]:
            out = block(out, *args, **kwargs)
        self.changes[branch] = out - first
        return out


def block_cache(model: nn.Module, branches: int = 2) -> None:
    cached = nn.ModuleList([CachedBlocks(model.blocks, branches)])
    original = model.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with unittest.mock.patch.object(self, "blocks", cached):
            return original(*args, **kwargs)

    model.forward = functools.update_wrapper(functools.partial(forward, model), forward)


# -- Ray: actors whose calls are promises, an object store, workers that can be lost --------------------------
class RayActorError(Exception):
    """The worker is gone."""


class RayTaskError(Exception):
    """A task failed on a worker."""

    def as_instanceof_cause(self) -> BaseException | None:
        return self.__cause__


class Ray:
    """A cluster in this process. What goes to a worker is pickled; of two running tasks the later one ends first.

    `lose` names how many of the next calls lose their worker; `answers` are the addresses where a cluster is.
    """

    exceptions = SimpleNamespace(RayActorError=RayActorError, RayTaskError=RayTaskError)

    def __init__(self, cpus: int = 2, gpus: int = 0, answers: tuple[str, ...] = ("auto",)):
        self.total, self.answers = {"CPU": float(cpus), "GPU": float(gpus)}, answers
        self.lose, self.connected, self.address = 0, False, None
        self.started: list[Actor] = []

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, address: str | None = None, **_: Any) -> None:
        if address is not None and address not in self.answers:
            raise ConnectionError("nobody there")
        self.connected, self.address = True, address

    def shutdown(self) -> None:
        self.connected = False

    def cluster_resources(self) -> dict[str, float]:
        return {name: count for name, count in self.total.items() if count}

    def remote(self, **resources: float) -> Any:
        return lambda kind: SimpleNamespace(remote=functools.partial(Actor, self, kind, resources))

    def put(self, value: Any) -> Stored:
        return Stored(pickle.dumps(value))

    def wait(self, promises: list, num_returns: int = 1) -> tuple[list, list]:
        return promises[-num_returns:], promises[:-num_returns]

    def get(self, promise: Any) -> Any:
        return promise()

    def kill(self, actor: Actor) -> None:
        actor.alive = False


class Stored:
    def __init__(self, data: bytes):
        self.data = data


class Actor:
    """One worker; a method's `remote` gives the promise of its result."""

    def __init__(self, ray: Ray, kind: type, resources: dict[str, float], *given: Any):
        self.ray, self.resources, self.alive = ray, resources, True
        self.make = functools.partial(kind, *pickle.loads(pickle.dumps(given)))
        self.made: Any = None
        ray.started.append(self)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given: functools.partial(self.call, method, pickle.dumps(_plain(given))))

    def call(self, method: str, given: bytes) -> Any:
        if self.ray.lose:
            self.ray.lose, self.alive = self.ray.lose - 1, False
        if not self.alive:
            raise RayActorError("the actor died")
        try:
            self.made = self.made or self.make()
            return getattr(self.made, method)(*pickle.loads(given))
        except Exception as error:
            raise RayTaskError(str(error)) from error


def _plain(given: tuple) -> tuple:
    return tuple(pickle.loads(value.data) if isinstance(value, Stored) else value for value in given)
