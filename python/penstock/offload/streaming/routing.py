"""Calls of experts: runs the functions of transformers with matrices read as they are needed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedStateError
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.offload.streaming.expert_cache import ExpertCache, ExpertsUse
    from penstock.offload.streaming.experts import Mixture

_KNOWN = (None, "eager", "grouped_mm", "batched_mm")
"""Experts implementations of transformers that need only PyTorch; None means eager."""

_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
"""Products of groups of rows: PyTorch's, and that of transformers for GPUs too old for those."""


def route(mixture: Mixture, cache: ExpertCache) -> None:
    """Makes a module's calls read only the experts that the router chose.

    Each call runs on a copy of the module with its own parameters, so that threads do not share
    experts.
    """
    module = mixture.module
    mixture.empty(cache.device)

    def forward(hidden: Any, index: Any, weights: Any) -> Any:
        chosen = module.config._experts_implementation
        if chosen not in _KNOWN:
            raise UnsupportedStateError(
                f"experts_implementation={chosen!r} does not work with experts that are streamed:"
                " call set_experts_implementation('grouped_mm') of the model",
                key="experts_implementation",
            )
        cache.check_stream()
        numbers = [mixture.first + at for at in index.unique().tolist() if at < mixture.count]
        stand_in = object.__new__(type(module))
        stand_in.__dict__ = {**module.__dict__}
        del stand_in.forward
        # The eager function uses experts in ascending order and adds up; the others use all at
        # once.
        is_ordered = chosen in (None, "eager")
        with cache.use(list(mixture.slabs), numbers, is_ordered=is_ordered) as use:
            asked = _LastAnswer()
            routed = {name: _RoutedParameter(mixture, name, use, asked) for name in mixture.slabs}
            stand_in._parameters = {**module._parameters, **routed}
            return type(module).forward(stand_in, hidden, index, weights)

    # Only code around this function is compiled.
    module.forward = dtypes.import_torch().compiler.disable(forward)


class _RoutedParameter:
    """Stands for a parameter of all experts, whose matrices are read one by one.

    A product with it is computed matrix by matrix, as PyTorch computes it, with the same bits. All
    other steps of a call are computed for all tokens together: whether an element is computed in a
    vector, which rounds differently, depends on its position in the tensor.
    """

    def __init__(
        self,
        mixture: Mixture,
        attribute: str,
        use: ExpertsUse,
        asked: _LastAnswer,
        rows: Any = None,
        is_turned: bool = False,
    ) -> None:
        whole = mixture.module._parameters[attribute]
        self.dtype = whole.dtype
        self.shape = (*whole.shape[:-2], *(whole.shape[:-3:-1] if is_turned else whole.shape[-2:]))
        self.device = whole.device
        self._of = mixture, attribute, use, asked
        self._rows = rows
        self._is_turned = is_turned

    def __getitem__(self, index: Any) -> Any:
        mixture, attribute, use, _ = self._of
        if index.ndim == 0:
            return use.the(attribute, mixture.first + int(index))
        return _RoutedParameter(*self._of, index, self._is_turned)

    def transpose(self, *_: int) -> _RoutedParameter:
        """Swaps the last two dimensions, the only ones that callers swap."""
        return _RoutedParameter(*self._of, self._rows, not self._is_turned)

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del kinds
        torch = dtypes.import_torch()
        if getattr(function, "__name__", None) in _GROUPED:
            return args[1]._grouped(function, args[0], **kwargs)
        if function is torch.bmm and isinstance(args[0], cls):
            one, inputs = args
            shape = (len(inputs), one.shape[-2], inputs.shape[-1])
            return one._batched(lambda matrices, some: torch.bmm(matrices, some), inputs, shape)
        if function is torch.bmm:
            inputs, one = args
            shape = (len(inputs), inputs.shape[-2], one.shape[-1])
            return one._batched(lambda matrices, some: torch.bmm(some, matrices), inputs, shape)
        return NotImplemented

    def _each(self) -> Any:
        """Yields the experts' numbers within the layer and their matrices, as they are read."""
        mixture, attribute, use, _ = self._of
        for number, matrix in use.each(attribute):
            yield number - mixture.first, matrix.t() if self._is_turned else matrix

    def _grouped(self, function: Any, inputs: Any, *, offs: Any, **options: Any) -> Any:
        """Products of groups of rows, each with the matrix of its expert."""
        ends, counts = self._of[-1].of(offs, _ends)
        outputs = inputs.new_zeros((len(inputs), self.shape[-1]))
        for at, matrix in self._each():
            rows = slice(ends[at], ends[at + 1])
            count = counts[at : at + 1]
            outputs[rows] = function(inputs[rows], matrix.unsqueeze(0), offs=count, **options)
        return outputs

    def _batched(self, product: Any, inputs: Any, shape: tuple[int, ...]) -> Any:
        """Products of each input with the matrix of its expert."""
        order, numbers = self._of[-1].of(self._rows, _sorted)
        outputs = inputs.new_zeros(shape)
        for at, matrix in self._each():
            mine = order[bisect_left(numbers, at) : bisect_right(numbers, at)]
            if inputs.device.type != "cpu":
                # A GPU library may choose its algorithm by the number of products: keep that.
                outputs[mine] = product(matrix.expand(len(inputs), -1, -1), inputs)[mine]
                continue
            if len(mine) == 1 < len(inputs):
                # A batch of one takes another path, with different bits.
                mine = mine.repeat(2)
            matrices = matrix.expand(len(mine), -1, -1).contiguous()
            outputs[mine] = product(matrices, inputs[mine])
        return outputs


class _LastAnswer:
    """Caches the answer about the last tensor: each product of a call asks about the same one.

    To read values of a device, the host waits for all work before; copies to a device wait, too. So
    values that a kernel needs stay on the device.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Any] = None, None

    def of(self, tensor: Any, ask: Callable[[Any], Any]) -> Any:
        """The answer of ``ask`` for a tensor, computed once for the same tensor."""
        if self._last[0] is not tensor:
            self._last = tensor, ask(tensor)
        return self._last[1]


def _ends(offs: Any) -> tuple[list[int], Any]:
    """Begins of the groups of rows and the last end, on the host; their sizes, on the device."""
    return [0, *offs.tolist()], offs.diff(prepend=offs.new_zeros(1))


def _sorted(numbers: Any) -> tuple[Any, list[int]]:
    """The positions that sort the numbers, and the sorted numbers."""
    found = numbers.sort(stable=True)
    return found.indices, found.values.tolist()
