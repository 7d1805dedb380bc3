"""A GPU without one: tensors whose memory only the driver for tests can reach.

`make test-python` builds the driver (``crates/cuda-fake``). Penstock uses it as it uses NVIDIA's,
by the path in ``PENSTOCK_CUDA_DRIVER``. PyTorch does not know it: a `GpuTensor` has the device, the
strides and the address of a tensor of ``cuda:0``, and is taken for one.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.loading import matching
from penstock.state.flatten import Flattener
from penstock.state.memory import of_tensor

DRIVER = Path(__file__).resolve().parents[2] / "target/release/libpenstock_cuda_fake.so"
VARIABLE = "PENSTOCK_CUDA_DRIVER"

_NON_BLOCKING = 1


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def drawn(shape, dtype, seed=0):
    """A tensor whose bytes tell places apart."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.empty(shape, dtype=dtype).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    nbytes = items * torch.empty((), dtype=dtype).element_size()
    # Without an exponent of all ones: what is no number is not equal to itself.
    raw = torch.randint(0, 60, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


def layouts(dtype):
    base = drawn((12, 10, 7), dtype)
    return {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "rows": base[2:9],
        "columns": base[:, 3:8],
        "long rows": drawn((6, 1200), dtype, 4)[:, 100:1000],
        "items": base[..., 1:6],
        "steps": base[::3, :, ::2],
        "inner": base.permute(2, 0, 1)[1:5],
        "expanded": drawn((5, 1, 4), dtype, 1).expand(5, 6, 4),
        "scalar": drawn((), dtype, 2),
        "one": drawn((1, 1), dtype, 3),
        "empty": torch.empty((3, 0, 2), dtype=dtype),
    }


def same(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8),
        other.contiguous().reshape(-1).view(torch.uint8),
    )


class GpuTensor(torch.Tensor):
    """A tensor of ``cuda:0``, as far as Penstock looks at one."""

    @staticmethod
    def __new__(cls, gpu, address, like, block=None):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device="cuda:0",
        )
        tensor.gpu = gpu
        tensor.storage_address = address
        # What is in use as long as a tensor of it is.
        tensor.block = block
        return tensor

    def data_ptr(self):
        return self.storage_address + self.storage_offset() * self.element_size()

    # What PyTorch does by a kernel.

    def contiguous(self):
        return self.gpu.put(self.gpu.read(self).contiguous())

    def copy_(self, source):
        view = self.gpu.view_of(self)
        view.copy_(self.gpu.read(source) if type(source) is GpuTensor else source)
        self.gpu.change(self, view)
        return self

    # And what it does without one: other tensors of the same memory.

    def alias(self, like):
        return GpuTensor(self.gpu, self.storage_address, like, self.block)

    def view(self, dtype):
        assert dtype.itemsize == self.itemsize
        like = torch.empty(0, dtype=dtype, device="meta")
        return self.alias(like.as_strided(self.shape, self.stride(), self.storage_offset()))

    def as_strided(self, *where):
        return self.alias(torch.empty(0, dtype=self.dtype, device="meta").as_strided(*where))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten.detach.default:
            return args[0].alias(args[0])
        if func is aten._to_copy.default:
            return args[0].gpu.read(args[0])
        if func is aten.copy_.default:
            return args[0].copy_(args[1].gpu.read(args[1]))
        if func in (aten._neg_view.default, aten._conj.default):
            raise AssertionError("views of that kind are not made here")
        raise NotImplementedError(str(func))


class Gpu:
    """The driver's first device, and the stream of a training on it."""

    def __init__(self):
        self.driver = ctypes.CDLL(str(DRIVER))
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)
        self._context = context
        self.stream = self.new_stream()
        self.asked = []
        self.fresh = Fresh()
        self._allocated = []
        self._kept = []

    def call(self, name, *arguments):
        """Calls a function of the driver's that has to succeed."""
        assert getattr(self.driver, name)(*arguments) == 0, name

    def calls(self, name):
        """How often a function was called."""
        count = self.driver.penstock_fake_calls
        count.restype = ctypes.c_uint64
        return count(name.encode())

    def new_stream(self):
        """A stream whose delays are drawn from here on."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def draw(self, seed, delay_us_max):
        """Has the training's stream take times that are drawn anew."""
        self.driver.penstock_fake_seed(ctypes.c_uint64(seed))
        self.driver.penstock_fake_delay_us_max(ctypes.c_uint64(delay_us_max))
        self.stream = self.new_stream()

    def put(self, host):
        """A tensor of the device with the storage and the strides of one of the host."""
        address = self._allocate(host)
        self._write(address, host.untyped_storage())
        return GpuTensor(self, address, host)

    def _allocate(self, host):
        address = ctypes.c_uint64()
        nbytes = max(host.untyped_storage().nbytes(), 1)
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._allocated.append(address)
        return address.value

    def empty(self, shape, dtype):
        """New memory, which work that is queued on the training's stream still writes to."""
        tensor = self.put(drawn(shape, dtype, 77))
        if tensor.numel():
            tensor.block = _Block(self.fresh, tensor.nbytes)
        return tensor

    def put_pageable(self, host):
        """The same, where nothing can be pinned."""
        address, nbytes = self._allocate(host), ctypes.c_size_t(host.untyped_storage().nbytes())
        source = ctypes.c_void_p(host.untyped_storage().data_ptr())
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, nbytes)
        return GpuTensor(self, address, host)

    def change(self, tensor, host, *, is_counted=True):
        """What an optimizer does: queued, and counted by PyTorch, if it is not a fused one."""
        assert host.untyped_storage().nbytes() >= host.nbytes
        self._write(tensor.storage_address, host.untyped_storage())
        if is_counted:
            torch.autograd.graph.increment_version(tensor)

    def _write(self, address, storage):
        # Pinned, so that the host does not wait for the stream.
        pinned = ctypes.c_void_p()
        nbytes = ctypes.c_size_t(max(storage.nbytes(), 1))
        self.call("cuMemAllocHost_v2", ctypes.byref(pinned), nbytes)
        ctypes.memmove(pinned, storage.data_ptr(), storage.nbytes())
        source = ctypes.c_uint64(address)
        size = ctypes.c_size_t(storage.nbytes())
        if storage.nbytes():
            self.call("cuMemcpyHtoDAsync_v2", source, pinned, size, self.stream)
        self._kept.append(pinned)

    def read(self, tensor):
        """What PyTorch does to copy a tensor to the host: it waits."""
        return self.view_of(tensor).clone()

    def view_of(self, tensor):
        """A view, of the same strides, on a copy of the storage up to the tensor's end."""
        self.call("cuStreamSynchronize", self.stream)
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        items = tensor.storage_offset() + 1 + sum((size - 1) * stride for size, stride in reach)
        raw = torch.empty(items * tensor.element_size(), dtype=torch.uint8)
        source, size = ctypes.c_uint64(tensor.storage_address), ctypes.c_size_t(raw.numel())
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(raw.data_ptr()), source, size)
        where = (tensor.shape, tensor.stride(), tensor.storage_offset())
        return raw.view(tensor.dtype).as_strided(*where)

    @contextmanager
    def capturing(self):
        """The training's stream goes into a graph; the capture has to survive."""
        self.call("cuStreamBeginCapture_v2", self.stream, 0)
        yield
        graph = ctypes.c_void_p()
        self.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.call("cuGraphDestroy", graph)

    def forget(self):
        """Frees what new contents came from."""
        self.call("cuStreamSynchronize", self.stream)
        for pinned in self._kept:
            self.call("cuMemFreeHost", pinned)
        self._kept.clear()

    def free(self):
        """Frees all tensors as well."""
        self.forget()
        for address in self._allocated:
            self.call("cuMemFree_v2", address)
        self._allocated.clear()


class Fresh:
    """How much new memory is in use, and was at most."""

    def __init__(self):
        self.nbytes = self.nbytes_max = 0

    def use(self, nbytes):
        self.nbytes += nbytes
        self.nbytes_max = max(self.nbytes_max, self.nbytes)


class _Block:
    """New memory, from when it was made until no tensor of it is left."""

    def __init__(self, fresh, nbytes):
        fresh.use(nbytes)
        weakref.finalize(self, fresh.use, -nbytes)


_gpu = None


def have_gpu():
    """The one of this process; makes PyTorch and Penstock take it for one."""
    global _gpu
    if _gpu is None:
        os.environ.setdefault(VARIABLE, str(DRIVER))
        _gpu = Gpu()
    return _gpu


@contextmanager
def taken_for_real():
    """Has `GpuTensor` pass for a tensor of PyTorch's, and its stream for the current one."""
    gpu = have_gpu()
    make, read, stream = Flattener.__init__, matching._memory_of, torch.cuda.current_stream
    device = torch.cuda.current_device
    empty, to = torch.empty, torch.Tensor.to
    gpu.fresh = Fresh()

    def make_with_more(self, *arguments, **keywords):
        make(self, *arguments, **keywords)
        self._handlers[GpuTensor] = type(self)._tensor

    def read_more(value, name):
        return of_tensor(value, name) if type(value) is GpuTensor else read(value, name)

    Flattener.__init__, matching._memory_of = make_with_more, read_more

    def current_stream(ordinal=0):
        gpu.asked.append(ordinal)
        return SimpleNamespace(cuda_stream=gpu.stream.value)

    def make_empty(*shape, device=None, **keywords):
        if device is None or torch.device(device).type != "cuda":
            return empty(*shape, device=device, **keywords)
        sizes = shape[0] if isinstance(shape[0], tuple) else shape
        return gpu.empty(sizes, keywords.get("dtype", torch.float32))

    def move(tensor, *arguments, **keywords):
        to_gpu = arguments and getattr(arguments[0], "type", None) == "cuda"
        return gpu.put(tensor) if to_gpu else to(tensor, *arguments, **keywords)

    torch.cuda.current_stream, torch.empty, torch.Tensor.to = current_stream, make_empty, move
    torch.cuda.current_device = lambda: 0
    try:
        yield gpu
    finally:
        torch.cuda.current_device = device
        Flattener.__init__, matching._memory_of = make, read
        torch.cuda.current_stream, torch.empty, torch.Tensor.to = stream, empty, to
        gpu.free()


@pytest.fixture
def gpu():
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")
    with taken_for_real() as gpu:
        gpu.draw(1, 0)
        yield gpu
