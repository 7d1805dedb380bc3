"""PyTorch operations on a GPU that does not exist: the host computes them for `GpuTensor`s.

An operation waits for the stream, computes on the host with the shapes and strides of the tensors,
and copies its result to the device. So two ways of computing on the device have the same bits if
they call the same operations. Mixing tensors of the host and the device is an error, as on a GPU.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from gpu import GpuTensor


@contextmanager
def computing(gpu):
    """Makes tensors of the device usable in PyTorch's operations."""
    gpu.compute = _compute
    try:
        with _Making(gpu):
            yield
    finally:
        gpu.compute = None


class _Making(TorchFunctionMode):
    """Creates tensors of the driver for tests where PyTorch would create or move them."""

    def __init__(self, gpu):
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_there(kwargs.get("device")):
            return self._gpu.put(func(*args, **{**kwargs, "device": "cpu"}))
        if func is torch.Tensor.to and any(map(_is_there, args)):
            # It exists already.
            args = [one for one in args if not _is_there(one)]
            return func(*args, **kwargs) if args[1:] or kwargs else args[0]
        if func is torch.Tensor.nonzero:
            # Before PyTorch initializes the device.
            return torch.ops.aten.nonzero(*args)
        return func(*args, **kwargs)


def _is_there(device):
    if not isinstance(device, str | torch.device):
        return False
    return torch.device(device).type == "cuda"


def _compute(func, args, kwargs):
    first = next(one for one in tree_leaves((args, kwargs)) if type(one) is GpuTensor)
    gpu, returns = first.gpu, func._schema.returns
    is_to = func.overloadpacket is torch.ops.aten.to
    aliases = [one.alias_info for one in returns if one.alias_info is not None]
    if not is_to and any(not one.is_write for one in aliases):
        return tree_map(first.alias, func(first._like(), *args[1:], **kwargs))
    is_move = is_to or func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    read = {}

    def on_host(one):
        if type(one) is GpuTensor:
            return read.setdefault(id(one), gpu.read(one))
        if isinstance(one, torch.Tensor) and one.ndim and not is_move:
            raise AssertionError(f"{func}: a tensor of the host among those of a GPU")
        return one

    host_args, host_kwargs = tree_map(on_host, (list(args), dict(kwargs)))
    is_there = _is_there(kwargs.get("device", "cuda"))
    if is_there and "device" in kwargs:
        host_kwargs["device"] = "cpu"
    if func is torch.ops.aten.histc.default:
        # Counts integers only on a GPU.
        numbers, *rest = host_args
        made = func(numbers.float(), *rest, **host_kwargs).to(numbers.dtype)
    else:
        made = func(*host_args, **host_kwargs)
    written = {}
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        if given is not None:
            given.copy_(read[id(given)])
            written[id(read[id(given)])] = given

    def back(one):
        if not isinstance(one, torch.Tensor):
            return one
        if id(one) in written:
            return written[id(one)]
        return gpu.put(one) if is_there else one

    return tree_map(back, made)
