"""Run a transformer's own forward from any block on, from that block's cached input, with attention served here.

A transformer's blocks are a chain: what block i is handed by block i-1 (its *stream*: hidden states, in joint
attention the text's too) is all it knows of the blocks before. So the model's own code runs with the blocks
before i turned into cheap stand-ins and block i fed its cached stream: bit-exact, at the cost of the blocks
that do run. In the same way one block alone is run (`advance`), which is what probes and gradients are made of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import HeartError
from ...online.call import Handler

Stream = tuple[torch.Tensor, ...]
Serve = Callable[..., torch.Tensor]  # (call, q, k, v, dense) -> out, all [B, H, N, D]


class ReplayHandler(Handler):
    """An attention handler that is dense unless `serve` is set."""

    def __init__(self) -> None:
        self.serve: Serve | None = None
        self.watch: Callable[[Any], None] | None = None

    def start_forward(self, call: Any) -> None:
        """Tell a watcher; a replayed forward has no history."""
        if self.watch is not None:
            self.watch(call)

    def attend(self, call: Any, q, k, v, dense) -> torch.Tensor:
        """One attention call, [B, H, N, D]."""
        return dense(q, k, v) if self.serve is None else self.serve(call, q, k, v, dense)

    @contextlib.contextmanager
    def watched(self, watch: Callable[[Any], None]) -> Iterator[None]:
        """Give `watch` the call context of each forward inside the context."""
        before, self.watch = self.watch, watch
        try:
            yield
        finally:
            self.watch = before

    @contextlib.contextmanager
    def serving(self, serve: Serve | None) -> Iterator[None]:
        """Let `serve` answer attention calls inside the context."""
        before, self.serve = self.serve, serve
        try:
            yield
        finally:
            self.serve = before


@dataclass
class _Shape:
    """What one block hands on: enough to make a stand-in of it without running the block."""

    many: type | None  # tuple or list, None for a bare tensor
    tensors: list[tuple[torch.Size, torch.dtype, torch.device]]

    @classmethod
    def of(cls, output: Any) -> _Shape:
        parts = output if isinstance(output, (tuple, list)) else (output,)
        if not all(torch.is_tensor(p) for p in parts):
            raise HeartError(f"a block returns {type(output).__name__}, not tensors: it cannot be replayed")
        many = type(output) if isinstance(output, (tuple, list)) else None
        return cls(many, [(p.shape, p.dtype, p.device) for p in parts])

    def stand_in(self, requires_grad: bool = False) -> Any:
        """Tensors of the right shape that hold one number each."""
        parts = []
        for shape, dtype, device in self.tensors:
            one = torch.zeros((), dtype=dtype, device=device, requires_grad=requires_grad)
            parts.append(one.expand(shape))
        return parts[0] if self.many is None else self.many(parts)


@dataclass
class _Analysis:
    """Order of the blocks, what each returns, and which of its arguments are the stream."""

    order: list[int]  # positions in Replay.modules, as they are run
    shapes: list[_Shape]
    positions: list[list[int | str]]


@dataclass
class _Run:
    first: int = 0
    last: int = 1 << 30
    feed: Stream | None = None
    record: bool = False
    streams: dict[int, Stream] = field(default_factory=dict)


def block_path(transformer: torch.nn.Module, name: str) -> str:
    """The block that holds the module `name`: the outermost member of a ModuleList on its path."""
    parts, module = name.split("."), transformer
    for i, part in enumerate(parts):
        parent, module = module, getattr(module, part)
        if isinstance(parent, torch.nn.ModuleList):
            return ".".join(parts[: i + 1])
    raise HeartError(f"the attention layer {name!r} lies in no list of blocks: this model cannot be replayed")


@contextlib.contextmanager
def frozen(module: torch.nn.Module) -> Iterator[None]:
    """No gradients for parameters inside the context: only activations are differentiated."""
    wanted = [p for p in module.parameters() if p.requires_grad]
    for p in wanted:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in wanted:
            p.requires_grad_(True)


class Replay:
    """One transformer, intercepted, with block-wise replays. Use as a context manager; leaving restores it."""

    def __init__(self, transformer: torch.nn.Module, scheduler: Any = None):
        from ...models import attachment

        self.transformer, self.handler = transformer, ReplayHandler()
        self.attachment: attachment.Attachment | None = attachment.attach(
            transformer, self.handler, scheduler=scheduler
        )
        self.layers = list(self.attachment.layers)
        paths = [block_path(transformer, info.name) for info in self.layers]
        lists = {p.rsplit(".", 1)[0] for p in paths}
        self.paths = [f"{p}.{name}" for p in sorted(lists) for name, _ in transformer.get_submodule(p).named_children()]
        self.modules = [transformer.get_submodule(p) for p in self.paths]
        self._layer_module = [self.paths.index(p) for p in paths]
        self._run: _Run | None = None
        self._analyses: dict[Any, _Analysis] = {}
        self._recording: list[tuple[int, Any]] | None = None
        self._probing: list[list[int | str]] | None = None
        self._here: _Analysis | None = None
        self._originals = [m.__dict__.get("forward") for m in self.modules]
        for i, module in enumerate(self.modules):
            module.forward = self._shim(i, module.forward)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Give the transformer back as it was."""
        for module, original in zip(self.modules, self._originals):
            if original is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = original
        self._originals = []
        self.modules = []
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None

    # ---------------------------------------- what a block does in a replay

    def _shim(self, i: int, original: Callable) -> Callable:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._recording is not None:
                out = original(*args, **kwargs)
                self._recording.append((i, out))
                return out
            if self._run is None or self._here is None:
                return original(*args, **kwargs)
            return self._block(self._here.order.index(i), original, args, kwargs)

        return forward

    def _block(self, n: int, original: Callable, args: tuple, kwargs: dict) -> Any:
        run, analysis = self._run, self._here
        assert run is not None and analysis is not None
        if self._probing is not None:  # find out which arguments depend on the block before
            named = [*enumerate(args), *kwargs.items()]
            self._probing.append([place for place, x in named if torch.is_tensor(x) and x.requires_grad])
            return analysis.shapes[n].stand_in(requires_grad=True)
        if run.record:  # streams of all blocks wait in host memory, not on the device
            run.streams[n] = tuple(x.cpu() for x in _pick(args, kwargs, analysis.positions[n]))
        elif n == run.last + 1:
            run.streams[n] = _pick(args, kwargs, analysis.positions[n])
        if n < run.first or n > run.last:
            return analysis.shapes[n].stand_in()
        if n == run.first and run.feed is not None:
            args, kwargs = _put(args, kwargs, analysis.positions[n], run.feed)
        return original(*args, **kwargs)

    # ---------------------------------------- runs

    def _call(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        out = self.transformer(**{**inputs, "return_dict": False})
        return out[0]

    def _with(self, inputs: Mapping[str, Any], run: _Run) -> torch.Tensor:
        analysis = self.analysis(inputs)
        before = self._run, self._here
        self._run, self._here = run, analysis
        try:
            return self._call(inputs)
        finally:
            self._run, self._here = before

    def analysis(self, inputs: Mapping[str, Any]) -> _Analysis:
        """The chain of blocks for inputs of these shapes (two forwards the first time, one of them empty)."""
        key = tuple((k, tuple(v.shape), v.dtype) for k, v in sorted(inputs.items()) if torch.is_tensor(v))
        if key not in self._analyses:
            self._analyses[key] = self._analyse(inputs)
        return self._analyses[key]

    def _analyse(self, inputs: Mapping[str, Any]) -> _Analysis:
        shapes: list[tuple[int, _Shape]] = []
        self._recording = []
        try:
            with torch.no_grad(), self.handler.serving(None):
                self._call(inputs)
            shapes = [(i, _Shape.of(out)) for i, out in self._recording]
        finally:
            self._recording = None
        order = [i for i, _ in shapes]
        if len(set(order)) != len(order) or not order:
            raise HeartError("this transformer does not run each of its blocks once: it cannot be replayed")
        analysis = _Analysis(order, [s for _, s in shapes], [])
        self._run, self._here, self._probing = _Run(), analysis, []
        try:
            with torch.enable_grad(), frozen(self.transformer):
                self._call(inputs)
            analysis.positions = self._probing
        finally:
            self._run, self._here, self._probing = None, None, None
        if not all(analysis.positions[1:]):
            raise HeartError("a block takes nothing from the block before it: this model cannot be replayed")
        return analysis

    def block_of(self, layer: int, inputs: Mapping[str, Any]) -> int:
        """The place, in running order, of the block that holds attention layer `layer`."""
        return self.analysis(inputs).order.index(self._layer_module[layer])

    def blocks(self, inputs: Mapping[str, Any]) -> int:
        """How many blocks run in a forward."""
        return len(self.analysis(inputs).order)

    def forward(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The whole forward."""
        return self._call(inputs)

    def forward_recorded(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, list[Stream]]:
        """The whole forward and every block's stream, in host memory (block 0's is empty: embeddings feed it)."""
        run = _Run(record=True)
        out = self._with(inputs, run)
        return out, [run.streams.get(n, ()) for n in range(len(run.streams))]

    def advance(self, inputs: Mapping[str, Any], block: int, stream: Stream) -> Stream:
        """Run only `block` on its `stream`; returns the next block's stream, or (output,) after the last one."""
        run = _Run(first=block, last=block, feed=stream if block else None)
        out = self._with(inputs, run)
        return run.streams[block + 1] if block + 1 in run.streams else (out,)

    def finish(self, inputs: Mapping[str, Any], block: int, stream: Stream) -> torch.Tensor:
        """Run from `block` on its `stream` to the model's output; `block` may be one past the last."""
        if block == self.blocks(inputs):
            return stream[0]
        return self._with(inputs, _Run(first=block, feed=stream if block else None))


def _pick(args: tuple, kwargs: dict, positions: list[int | str]) -> Stream:
    return tuple(args[place] if isinstance(place, int) else kwargs[place] for place in positions)


def _put(args: tuple, kwargs: dict, positions: list[int | str], stream: Stream) -> tuple[tuple, dict]:
    new, named = list(args), dict(kwargs)
    for place, x in zip(positions, stream):
        if isinstance(place, int):
            new[place] = x
        else:
            named[place] = x
    return tuple(new), named
