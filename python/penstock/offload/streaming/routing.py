"""Calls of experts: the functions of transformers, with matrices that come as they are needed."""

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
"""Functions of transformers for experts that need nothing but PyTorch; none is eager."""

_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
"""Products of groups of rows: PyTorch's, and that of transformers for GPUs too old for those."""


def route(mixture: Mixture, cache: ExpertCache) -> None:
    """Has a module's calls read the experts that the router chose, and no others.

    Each call is one of a copy of the module, with parameters of its own, so threads do not see each
    other's experts.
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
        # One takes its experts in their order and adds up, the others take all at once.
        is_ordered = chosen in (None, "eager")
        with cache.use(list(mixture.slabs), numbers, is_ordered=is_ordered) as use:
            asked = _Asked()
            routed = {name: _Routed(mixture, name, use, asked) for name in mixture.slabs}
            stand_in._parameters = {**module._parameters, **routed}
            return type(module).forward(stand_in, hidden, index, weights)

    # What is compiled is what is called around it.
    module.forward = dtypes.import_torch().compiler.disable(forward)


class _Routed:
    """A parameter of all experts whose matrices come one by one.

    Products with it are made of those with each matrix, as PyTorch makes them, so they have the
    same bits; all else of a call is computed of all tokens together, as it depends on where in a
    tensor an element is whether it is computed in vectors, which round differently.
    """

    def __init__(
        self,
        mixture: Mixture,
        attribute: str,
        use: ExpertsUse,
        asked: _Asked,
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
        return _Routed(*self._of, index, self._is_turned)

    def transpose(self, *_: int) -> _Routed:
        """With rows and columns swapped, which is all that is asked for."""
        return _Routed(*self._of, self._rows, not self._is_turned)

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
        """The experts' places in the layer with their matrices, as they come."""
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
                # How a GPU's library multiplies may depend on how many products there are.
                outputs[mine] = product(matrix.expand(len(inputs), -1, -1), inputs)[mine]
                continue
            if len(mine) == 1 < len(inputs):
                # Batches of one go another way, whose bits are others.
                mine = mine.repeat(2)
            matrices = matrix.expand(len(mine), -1, -1).contiguous()
            outputs[mine] = product(matrices, inputs[mine])
        return outputs


class _Asked:
    """What the host has last asked of a tensor: each product of a call asks the same.

    Where a device has it, the host waits for what comes before, and copies to a device it waits
    for, too: so what a kernel takes of it stays there.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Any] = None, None

    def of(self, tensor: Any, ask: Callable[[Any], Any]) -> Any:
        """What there is to know of a tensor."""
        if self._last[0] is not tensor:
            self._last = tensor, ask(tensor)
        return self._last[1]


def _ends(offs: Any) -> tuple[list[int], Any]:
    """Where groups of rows begin and the last one ends; and how many rows each has, as it has."""
    return [0, *offs.tolist()], offs.diff(prepend=offs.new_zeros(1))


def _sorted(numbers: Any) -> tuple[Any, list[int]]:
    """Which places come first where numbers are sorted, and the numbers."""
    found = numbers.sort(stable=True)
    return found.indices, found.values.tolist()
