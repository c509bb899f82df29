"""A pretended GPU: tensors that say they are on "cuda:0" and compute on the CPU, so that crossings can be counted.

Counted are read-backs (whatever makes the host wait for the device: copies to the CPU, `.item()`, shapes that depend on
values), uploads, and launches (every operation that is not a view, and every Triton kernel, whose launches are stubs).
An operation that mixes tensors of both places fails, as it would on a GPU.
"""

import contextlib
import traceback
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda:0")
SHAPES_BY_VALUE = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount"}
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"} | SHAPES_BY_VALUE
COPIES = {"aten::_to_copy", "aten::copy_", "aten::to"}
EMPTY = {"aten::empty": "zeros", "aten::empty_like": "zeros_like", "aten::new_empty": "new_zeros"}


class OnGpu(torch.Tensor):
    """A tensor that says it is on the GPU."""

    @staticmethod
    def __new__(cls, inner):
        new = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device="meta",  # to torch itself: a torch without CUDA cannot even index a tensor of its devices
            storage_offset=inner.storage_offset(),
        )
        new.inner = inner
        return new

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self):
        return f"OnGpu({self.inner})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of FakeGpu")


def _inner(x):
    return x.inner if isinstance(x, OnGpu) else x


def _outer(x):
    return OnGpu(x) if isinstance(x, torch.Tensor) and not isinstance(x, OnGpu) else x


class FakeGpu(TorchDispatchMode):
    """Counts what crosses between host and device; `reads` holds the operation and the line that asked for it."""

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.reads, self.uploads, self.launches = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name, tensors = func._schema.name, [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if isinstance(x, OnGpu)]
        device = kwargs.get("device")
        target = here if device is None else torch.device(device).type in ("cuda", "meta")
        self._count(func, name, args, kwargs, tensors, here, target)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if name in EMPTY and isinstance(out, torch.Tensor):
            out.zero_()  # so that what stubs leave unwritten is something that can be gone on with
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and name.rstrip("_") != name:
            return args[0]
        if isinstance(out, torch.Tensor) and any(out is _inner(x) for x in tensors) and not here and target:
            out = out.clone()
        return tree_map(_outer, out) if target and name not in ("aten::_local_scalar_dense", "aten::equal") else out

    def _count(self, func, name, args, kwargs, tensors, here, target):
        if here and (name in READS or self._reads(name, args, kwargs, here, target)):
            self.reads.append((name, _line()))
        elif here or target:
            self.launches += not func.is_view and name not in ("aten::detach",)
        foreign = [x for x in tensors if not isinstance(x, OnGpu) and x.dim() > 0]
        if foreign and (here or target):
            if name not in COPIES and not name.startswith(("aten::index", "aten::_index")):
                raise AssertionError(f"{name} mixes tensors of the CPU and of the GPU at {_line()}")
            self.uploads += 1

    def _reads(self, name, args, kwargs, here, target):
        if name in COPIES:
            to = args[0] if name == "aten::copy_" else None
            source = args[1] if name == "aten::copy_" else args[0]
            cpu = not target if to is None else not isinstance(to, OnGpu)
            return isinstance(source, OnGpu) and cpu and not (kwargs.get("non_blocking") or True in args[2:])
        if name == "aten::repeat_interleave":
            return kwargs.get("output_size") is None
        if name in ("aten::index", "aten::index_put_", "aten::index_put"):
            picks = [x for x in args[1] if x is not None]
            return any(isinstance(x, OnGpu) and x.dtype == torch.bool for x in picks)
        return False


def _line():
    """Where in the package the operation was asked for."""
    frames = [f for f in traceback.extract_stack() if "heart_attention" in f.filename]
    return f"{frames[-1].filename.rpartition('heart_attention/')[2]}:{frames[-1].lineno}" if frames else "?"


class _Event:
    """Stands for a CUDA event that has always come to pass."""

    def record(self):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class _Stub:
    """Stands for a Triton kernel: a launch is counted and nothing is computed."""

    def __init__(self, gpu):
        self.gpu = gpu

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.gpu.launches += 1

        return launch


KERNELS = (
    "attention", "antidiagonal_sums", "antidiagonal_blocks", "nearest_centroid", "cluster_means", "pooled_sums",
    "kept_runs",
)  # fmt: skip


@contextlib.contextmanager
def fake_gpu(capability=(9, 0)):
    """A pretended GPU for the length of a block; gives the mode that counts."""
    from heart_attention.kernels import triton_attention, triton_code
    from heart_attention.online import engine
    from heart_attention.online.stats import Timer

    gpu = FakeGpu()
    stubs = {name: _Stub(gpu) for name in KERNELS}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(triton_code, **stubs))
        stack.enter_context(mock.patch.multiple(torch.cuda, is_available=lambda: True, current_device=lambda: 0))
        stack.enter_context(mock.patch.object(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda *a: capability))
        stack.enter_context(mock.patch.object(torch.cuda, "Event", _Event))
        stack.enter_context(mock.patch.object(engine, "Timer", lambda on_gpu=False: Timer(False)))
        stack.enter_context(mock.patch.object(triton_attention, "_descriptors", lambda *a: None))
        triton_attention._target.cache_clear()
        stack.callback(triton_attention._target.cache_clear)
        stack.enter_context(gpu)
        yield gpu
