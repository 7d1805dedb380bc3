"""A GPU without hardware: tensors whose memory only the driver for tests can reach.

`make test-python` builds the driver (``crates/cuda-fake``). Penstock uses it like NVIDIA's, by the
path in ``PENSTOCK_CUDA_DRIVER``. PyTorch does not know it: a `GpuTensor` has the device, the
strides and the address of a tensor of ``cuda:0``, and passes for one. `computing` implements
PyTorch's operations on such tensors.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import penstock
from penstock.checkpoint.loading import matching
from penstock.checkpoint.state.flatten import Flattener
from penstock.tensors.memory import of_tensor

DRIVER = Path(__file__).resolve().parents[2] / "target/release/libpenstock_cuda_fake.so"
VARIABLE = "PENSTOCK_CUDA_DRIVER"

_NON_BLOCKING = 1

_GLOBAL = 0
THREAD_LOCAL = 1
"""Capture mode that allows other threads to allocate memory during the capture."""


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
    """Returns a tensor whose bytes differ from place to place."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.empty(shape, dtype=dtype).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    nbytes = items * torch.empty((), dtype=dtype).element_size()
    # Excludes exponents of all ones, as NaN does not equal itself.
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
    """A tensor of ``cuda:0``, with the attributes that Penstock reads."""

    __torch_function__ = torch._C._disabled_torch_function_impl

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
        # Keeps the memory in use while a tensor refers to it.
        tensor.block = block
        return tensor

    def data_ptr(self):
        return self.storage_address + self.storage_offset() * self.element_size()

    def untyped_storage(self):
        return self.block or super().untyped_storage()

    # Operations that PyTorch runs as kernels.

    def contiguous(self):
        return self.gpu.put(self.gpu.read(self).contiguous())

    def copy_(self, source, non_blocking=False):
        if non_blocking and source.device.type == "cpu" and source.is_contiguous():
            self.gpu.bring(self, source)
            return self
        if self.is_contiguous():
            # Writes only the tensor's own bytes, as others may write to the rest of the storage.
            values = self.gpu.read(source) if type(source) is GpuTensor else source
            made = torch.empty(self.shape, dtype=self.dtype).copy_(values)
            self.gpu._write(self.data_ptr(), made.untyped_storage())
            torch.autograd.graph.increment_version(self)
            return self
        view = self.gpu.view_of(self)
        view.copy_(self.gpu.read(source) if type(source) is GpuTensor else source)
        self.gpu.change(self, view)
        return self

    def tolist(self):
        return self.gpu.read(self).tolist()

    def __int__(self):
        return int(self.gpu.read(self))

    def __bool__(self):
        return bool(self.gpu.read(self))

    # Operations without a kernel: other tensors of the same memory.

    def view(self, *how):
        return self.alias(self._like().view(*how))

    def reshape(self, *how):
        return self.view(*how)

    def as_strided(self, *where):
        return self.alias(self._like().as_strided(*where))

    def __getitem__(self, index):
        if (places := _on_host(index)) is not index:
            return self.gpu.put(self.gpu.read(self)[places].clone())
        return self.alias(self._like()[index])

    def split(self, counts):
        return [self.alias(one) for one in self._like().split(counts)]

    def __setitem__(self, index, values):
        if (places := _on_host(index)) is index:
            self[index].copy_(values)
            return
        changed = self.gpu.read(self)
        changed[places] = self.gpu.read(values)
        self.copy_(changed)

    def record_stream(self, stream):
        self.block.used_by.append(stream.cuda_stream)

    def alias(self, like):
        # A view is an inference tensor exactly if its base is.
        with torch.inference_mode(self.is_inference()):
            return GpuTensor(self.gpu, self.storage_address, like, self.block)

    def _like(self):
        """Returns a tensor of the same shape and place, without memory."""
        like = torch.empty(0, dtype=self.dtype, device="meta")
        return like.as_strided(self.shape, self.stride(), self.storage_offset())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if _gpu.compute is not None:
            return _gpu.compute(func, args, kwargs or {})
        aten = torch.ops.aten
        if func is aten.detach.default:
            return args[0].alias(args[0])
        if func in (aten._to_copy.default, aten.to.dtype_layout):
            return args[0].gpu.read(args[0])
        if func is aten.clone.default:
            return args[0].gpu.put(args[0].gpu.read(args[0]))
        if func is aten.copy_.default:
            target, source, *is_queued = args
            if is_queued == [True]:
                source.gpu.fetch(target, source)
                return target
            return target.copy_(source.gpu.read(source))
        if func is aten._foreach_copy_.default:
            for target, source in zip(*args[:2], strict=True):
                target.copy_(source)
            return None
        if func in (aten._neg_view.default, aten._conj.default):
            raise AssertionError("views of that kind are not made here")
        raise NotImplementedError(str(func))


def _on_host(index):
    """Returns an index with its device tensors copied to the host."""
    if type(index) is GpuTensor:
        return index.gpu.read(index)
    if isinstance(index, tuple) and any(isinstance(one, torch.Tensor) for one in index):
        return tuple(map(_on_host, index))
    assert not isinstance(index, torch.Tensor), "a tensor of the host is an index of a GPU's"
    return index


class Block:
    """Memory of the device, given to the next tensor once all references are gone.

    Like PyTorch's allocator, it is reused at once, whatever a stream still does with it.
    """

    def __init__(self, gpu, address, nbytes):
        self._gpu = gpu
        self.used_by = []
        self._unused = gpu.unused.setdefault(nbytes, [])
        self._address = address
        self._nbytes = nbytes

    def data_ptr(self):
        return self._address

    def nbytes(self):
        return self._nbytes

    def __del__(self):
        # PyTorch's allocator would wait for that stream; here the memory is never reused.
        unused = self._gpu.unused.setdefault(0, []) if self.used_by else self._unused
        unused.append(self._address)


class Gpu:
    """The driver's first device, and a training's stream on it."""

    def __init__(self):
        self.driver = ctypes.CDLL(str(DRIVER))
        self._thread = threading.current_thread()
        self._of_thread = threading.local()
        self._of_thread.has_context = True
        self._allocating = threading.RLock()
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)
        self._context = context
        self.stream = self.new_stream()
        # Default stream of threads beside the training's; None for `stream`.
        self.others = None
        self.asked = []
        # Tensors that PyTorch moved so that the host may have to wait for its stream.
        self.waited = []
        self.fresh = Fresh()
        self.compute = None
        self.unused = {}
        self._kept = []

    def call(self, name, *arguments):
        """Calls a function of the driver, which has to succeed."""
        if not getattr(self._of_thread, "has_context", False):
            self._of_thread.has_context = True
            self.driver.cuCtxPushCurrent_v2(self._context)
        assert getattr(self.driver, name)(*arguments) == 0, name

    @property
    def current(self):
        """Returns the current stream of this thread."""
        if self._chosen is not None:
            return self._chosen
        if self.others is not None and threading.current_thread() is not self._thread:
            return self.others
        return self.stream

    @property
    def _chosen(self):
        chosen = getattr(self._of_thread, "streams", None)
        return chosen[-1] if chosen else None

    @contextmanager
    def choosing(self, stream):
        """Chooses a stream for this thread, like `torch.cuda.stream`."""
        chosen = self._of_thread.__dict__.setdefault("streams", [])
        chosen.append(ctypes.c_void_p(stream.cuda_stream))
        try:
            yield
        finally:
            chosen.pop()

    def fail(self, name, nth=1, status=999):
        """Makes the nth call of a function from now fail."""
        self.driver.penstock_fake_fail_call(name.encode(), ctypes.c_uint64(nth), status)

    def mend(self):
        """Clears the faults that have not struck yet."""
        self.driver.penstock_fake_clear_faults()

    @contextmanager
    def holding(self, stream=None):
        """Holds back the work of a stream, or of all streams."""
        if stream is None:
            self.driver.penstock_fake_hold_all()
        else:
            self.driver.penstock_fake_hold(ctypes.c_uint64(stream.value))
        try:
            yield
        finally:
            self.driver.penstock_fake_release_all()
            if stream is not None:
                self.driver.penstock_fake_release(ctypes.c_uint64(stream.value))

    def leaks(self):
        """Counts the driver's unreleased resources by kind."""
        names = (
            "allocations",
            "device_bytes",
            "registered",
            "pinned_allocations",
            "pinned_bytes",
            "streams",
            "events",
            "modules",
            "graphs",
            "retained",
        )
        counts = (ctypes.c_uint64 * len(names))()
        self.driver.penstock_fake_leaks(counts)
        return dict(zip(names, counts, strict=True))

    def calls(self, name):
        """Returns the number of calls of a function."""
        count = self.driver.penstock_fake_calls
        count.restype = ctypes.c_uint64
        return count(name.encode())

    def new_stream(self):
        """Creates a stream with newly drawn delays."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def draw(self, seed, delay_us_max):
        """Gives the training a new stream with newly drawn delays."""
        # The old stream has to finish with its memory before another stream uses that.
        self.call("cuStreamSynchronize", self.stream)
        self.driver.penstock_fake_seed(ctypes.c_uint64(seed))
        self.driver.penstock_fake_delay_us_max(ctypes.c_uint64(delay_us_max))
        self.stream = self.new_stream()

    def put(self, host, stream=None):
        """Returns a device tensor with the storage and the strides of a host tensor."""
        block, address = self._allocate(host)
        tensor = GpuTensor(self, address, host, block)
        self._write(address, host.untyped_storage(), stream)
        return tensor

    def _allocate(self, host):
        nbytes = max(host.untyped_storage().nbytes(), 1)
        with self._allocating:
            if unused := self.unused.get(nbytes):
                address = unused.pop()
            else:
                allocated, wanted = ctypes.c_uint64(), ctypes.c_size_t(nbytes)
                if self.driver.cuMemAlloc_v2(ctypes.byref(allocated), wanted) != 0:
                    self._release_unused()
                    self.call("cuMemAlloc_v2", ctypes.byref(allocated), wanted)
                address = allocated.value
        return Block(self, address, nbytes), address

    def _release_unused(self):
        for addresses in self.unused.values():
            while addresses:
                self.call("cuMemFree_v2", ctypes.c_uint64(addresses.pop()))

    def empty(self, shape, dtype):
        """Returns new memory, to which queued work of the training's stream still writes.

        In a thread that has chosen a stream, the work is on that stream.
        """
        tensor = self.put(drawn(shape, dtype, 77), self._chosen)
        if tensor.numel():
            self.fresh.use(tensor.nbytes)
            weakref.finalize(tensor.block, self.fresh.use, -tensor.nbytes)
        return tensor

    def put_pageable(self, host):
        """Returns a device tensor, without using pinned memory."""
        block, address = self._allocate(host)
        source = ctypes.c_void_p(host.untyped_storage().data_ptr())
        nbytes = ctypes.c_size_t(host.untyped_storage().nbytes())
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, nbytes)
        return GpuTensor(self, address, host, block)

    def change(self, tensor, host, *, is_counted=True):
        """Queues a change like an optimizer's; PyTorch does not count those of fused ones."""
        assert host.untyped_storage().nbytes() >= host.nbytes
        self._write(tensor.storage_address, host.untyped_storage())
        if is_counted:
            torch.autograd.graph.increment_version(tensor)

    def _write(self, address, storage, stream=None):
        # Pinned, so that the host does not wait for the stream.
        pinned = ctypes.c_void_p()
        nbytes = ctypes.c_size_t(max(storage.nbytes(), 1))
        self.call("cuMemAllocHost_v2", ctypes.byref(pinned), nbytes)
        ctypes.memmove(pinned, storage.data_ptr(), storage.nbytes())
        source = ctypes.c_uint64(address)
        size = ctypes.c_size_t(storage.nbytes())
        if storage.nbytes():
            self.call("cuMemcpyHtoDAsync_v2", source, pinned, size, stream or self.stream)
        self._kept.append(pinned)

    def bring(self, tensor, host):
        """Copies pinned memory to the device as PyTorch does, without waiting."""
        address, source = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_void_p(host.data_ptr())
        size = ctypes.c_size_t(host.nbytes)
        if host.nbytes:
            self.call("cuMemcpyHtoDAsync_v2", address, source, size, self.current)
        torch.autograd.graph.increment_version(tensor)

    def fetch(self, host, tensor):
        """Copies from the device to pinned memory as PyTorch does, without waiting."""
        assert tensor.is_contiguous()
        target, address = ctypes.c_void_p(host.data_ptr()), ctypes.c_uint64(tensor.data_ptr())
        if host.nbytes:
            size = ctypes.c_size_t(host.nbytes)
            self.call("cuMemcpyDtoHAsync_v2", target, address, size, self.current)

    def pinned(self, sizes, dtype):
        """Returns a pinned tensor, freed by the next `forget` once no reference is left."""
        place, count = ctypes.c_void_p(), math.prod(sizes)
        nbytes = max(count * dtype.itemsize, 1)
        if self.driver.cuMemAllocHost_v2(ctypes.byref(place), ctypes.c_size_t(nbytes)) != 0:
            raise RuntimeError("CUDA error: out of memory")
        memory = (ctypes.c_uint8 * nbytes).from_address(place.value)
        weakref.finalize(memory, self._kept.append, place)
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        pinned = raw[: count * dtype.itemsize].view(dtype).view(sizes)
        pinned.is_fake_pinned = True
        return pinned

    def look(self, tensor):
        """Queues a kernel that reads a contiguous tensor; returns a function that awaits it."""
        pinned, nbytes = ctypes.c_void_p(), ctypes.c_size_t(tensor.nbytes)
        self.call("cuMemAllocHost_v2", ctypes.byref(pinned), nbytes)
        address = ctypes.c_uint64(tensor.data_ptr())
        self.call("cuMemcpyDtoHAsync_v2", pinned, address, nbytes, self.stream)
        self._kept.append(pinned)
        stream, shape, dtype = self.stream, tuple(tensor.shape), tensor.dtype

        def seen():
            self.call("cuStreamSynchronize", stream)
            raw = (ctypes.c_uint8 * nbytes.value).from_address(pinned.value)
            return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)

        return seen

    def peek(self, tensor):
        """Returns the current content of a contiguous tensor, whatever is queued."""
        raw = torch.empty(tensor.nbytes, dtype=torch.uint8)
        place = ctypes.c_void_p(raw.data_ptr()), ctypes.c_uint64(tensor.data_ptr())
        self.call("cuMemcpyDtoH_v2", *place, ctypes.c_size_t(tensor.nbytes))
        return raw.view(tensor.dtype).view(tensor.shape)

    def read(self, tensor):
        """Copies a tensor to the host as PyTorch does, waiting for the stream."""
        view = self.view_of(tensor)
        is_all = view.is_contiguous() and view.nbytes == view.untyped_storage().nbytes()
        return view if is_all else view.clone()

    def view_of(self, tensor):
        """Returns a view of the same strides on a host copy of the storage."""
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
    def another_current(self, monkeypatch):
        """Makes the second device the current one for calls during the block."""
        plain = torch.cuda.current_stream

        def current_stream(ordinal=0):
            if ordinal == 1:
                return SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 1))
            return plain(ordinal)

        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: 1)
            patch.setattr(torch.cuda, "current_stream", current_stream)
            yield

    @contextmanager
    def capturing(self, mode=_GLOBAL):
        """Captures the training's stream in a graph; the capture has to survive."""
        self.call("cuStreamBeginCapture_v2", self.stream, mode)
        yield
        graph = ctypes.c_void_p()
        self.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.call("cuGraphDestroy", graph)

    def forget(self):
        """Frees the pinned sources of new contents."""
        self.call("cuStreamSynchronize", self.stream)
        for pinned in self._kept:
            self.call("cuMemFreeHost", pinned)
        self._kept.clear()


class Fresh:
    """Bytes of new memory in use, and their maximum."""

    def __init__(self):
        self.nbytes = self.nbytes_max = 0

    def use(self, nbytes):
        self.nbytes += nbytes
        self.nbytes_max = max(self.nbytes_max, self.nbytes)


def is_refused_in_a_fork(*asks):
    """Whether each call is refused by name in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for ask in asks:
            try:
                ask()
            except penstock.PenstockError as error:
                told.append("fork" in str(error))
            except BaseException:
                told.append(False)
        os.write(writing, repr(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as found:
        told = found.read()
    return os.waitpid(child, 0)[1] == 0 and told == repr([True] * len(asks))


_gpu = None


def have_gpu():
    """Returns this process's GPU, which PyTorch and Penstock take for a real one."""
    global _gpu
    if _gpu is None:
        os.environ.setdefault(VARIABLE, str(DRIVER))
        _gpu = Gpu()
    return _gpu


@contextmanager
def taken_for_real():
    """Makes `GpuTensor` pass for a tensor of PyTorch, and its stream for the current one."""
    gpu = have_gpu()
    make, read = Flattener.__init__, matching._memory_of
    gpu.fresh, gpu.waited, gpu.others = Fresh(), [], None
    empty, to, as_tensor = torch.empty, torch.Tensor.to, torch.as_tensor

    def make_with_more(self, *arguments, **keywords):
        make(self, *arguments, **keywords)
        self.handlers[GpuTensor] = type(self).encode_tensor

    def read_more(value, name):
        return of_tensor(value, name) if type(value) is GpuTensor else read(value, name)

    def current_stream(ordinal=0):
        gpu.asked.append(ordinal)
        device = torch.device("cuda", 0)
        return SimpleNamespace(cuda_stream=gpu.current.value, device=device)

    def make_empty(*shape, device=None, pin_memory=False, **keywords):
        if device is None or torch.device(device).type != "cuda":
            made = empty(*shape, device=device, **keywords)
            return gpu.pinned(made.shape, made.dtype) if pin_memory else made
        sizes = shape[0] if isinstance(shape[0], tuple) else shape
        return gpu.empty(sizes, keywords.get("dtype", torch.float32))

    def pin(tensor):
        return gpu.pinned(tensor.shape, tensor.dtype).copy_(tensor)

    def move(tensor, *arguments, **keywords):
        device = keywords.get("device", arguments[0] if arguments else None)
        if getattr(device, "type", None) != "cuda":
            if type(tensor) is GpuTensor and str(device) == "cpu" and keywords.get("non_blocking"):
                # PyTorch copies to pinned memory without waiting.
                host = gpu.pinned(tensor.shape, tensor.dtype)
                gpu.fetch(host, tensor)
                return host
            return to(tensor, *arguments, **keywords)
        if type(tensor) is GpuTensor:
            return to(tensor, *arguments, **keywords) if arguments[1:] else tensor
        if not (keywords.get("non_blocking") and getattr(tensor, "is_fake_pinned", False)):
            gpu.waited.append(tuple(tensor.shape))
        return gpu.put(tensor.contiguous(), gpu.current)

    def as_it_is(value, *arguments, **keywords):
        if type(value) is not GpuTensor:
            return as_tensor(value, *arguments, **keywords)
        return gpu.read(value) if keywords.get("device") == "cpu" else value

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flattener, "__init__", make_with_more)
            patch.setattr(matching, "_memory_of", read_more)
            patch.setattr(torch.cuda, "current_stream", current_stream)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(torch.cuda, "stream", gpu.choosing)
            patch.setattr(torch, "empty", make_empty)
            patch.setattr(torch, "as_tensor", as_it_is)
            patch.setattr(torch.Tensor, "to", move)
            patch.setattr(torch.Tensor, "pin_memory", pin)
            yield gpu
    finally:
        gpu.mend()
        gpu.forget()


@pytest.fixture
def gpu():
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")
    with taken_for_real() as gpu:
        gpu.draw(1, 0)
        yield gpu
