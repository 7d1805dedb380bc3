"""Lets programs that call for a CUDA device run on the host, for benchmarks and tests.

Megatron-Core asks for a GPU in any case: it names the device "cuda", looks for types such as
``torch.cuda.BFloat16Tensor``, and waits for streams. With `host_for_cuda` all of that is the host's
memory and does nothing. It is not meant for machines that have a GPU, where it changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

# Looks for the functions of torch.cuda at its import, before they are replaced.
import torch._dynamo
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_modes: list[TorchFunctionMode] = []
"""The mode that is active, which has to be kept."""


class _Stream:
    """A stream or an event without work."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        """Whether the work has ended."""
        return True

    def record_event(self, *_: object) -> _Stream:
        """An event behind the work."""
        return _Stream()

    def elapsed_time(self, _: object) -> float:
        """Milliseconds between two events."""
        return 0.0

    def wait_stream(self, *_: object) -> None:
        """Waits for another stream."""

    wait_event = record = synchronize = wait = wait_stream


class _OnHost(TorchFunctionMode):
    """Makes tensors of the host where a CUDA device is named, and describes them as a GPU's."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not named:
            return function(*args).replace("torch.", "torch.cuda.")
        if "device" in named:
            named["device"] = _host(named["device"])
        if function is torch.Tensor.to:
            args = (args[0], *map(_host, args[1:]))
        return function(*args, **named)


def _host(device: Any) -> Any:
    """The host's device for a CUDA device, and everything else as it is."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    is_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if is_cuda or is_index else device


def host_for_cuda() -> None:
    """Takes the host for all CUDA devices, in this thread and until the process ends."""
    if torch.cuda.is_available() or _modes:
        return

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    def nothing(*_: object, **__: object) -> None:
        pass

    def itself(one: Any, *_: object, **__: object) -> Any:
        return one

    cuda: Any = torch.cuda
    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state = get_state, set_state
    for name in ("synchronize", "set_device", "empty_cache", "init", "reset_peak_memory_stats"):
        setattr(cuda, name, nothing)
    cuda.manual_seed = torch.manual_seed
    cuda.current_device = lambda: "cpu"
    cuda.device_count = lambda: 8
    # With PYTORCH_NVML_BASED_CUDA_CHECK, which Accelerate sets, it would follow from the count.
    cuda.is_available = lambda: False
    cuda.default_generators = defaultdict(lambda: torch.default_generator)
    cuda._lazy_call = lambda call, **_: call()
    cuda.Stream = cuda.Event = cuda.stream = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    tensor, module = torch.Tensor, torch.nn.Module
    tensor.cuda = itself  # type: ignore[method-assign, assignment]
    module.cuda = itself  # type: ignore[method-assign, assignment]
    mode: Any = _OnHost()
    mode.__enter__()
    _modes.append(mode)
