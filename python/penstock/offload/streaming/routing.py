"""Calls of experts: the functions of transformers, with matrices that come as they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedStateError
from penstock.state import dtypes

if TYPE_CHECKING:
    from penstock.offload.streaming.expert_cache import ExpertCache, ExpertsUse
    from penstock.offload.streaming.experts import Mixture

_KNOWN = (None, "eager", "grouped_mm", "batched_mm")
"""Of the functions for experts that transformers has, those that run on a CPU; none is eager."""


def route(mixture: Mixture, cache: ExpertCache) -> None:
    """Has a module's calls read the experts that the router chose, and no others.

    Each call is one of a copy of the module, with parameters of its own, so threads do not see each
    other's experts.
    """
    module = mixture.module
    mixture.empty()

    def forward(hidden: Any, index: Any, weights: Any) -> Any:
        chosen = module.config._experts_implementation
        if chosen not in _KNOWN:
            raise UnsupportedStateError(
                f"experts_implementation={chosen!r} does not work with experts that are streamed:"
                " call set_experts_implementation('grouped_mm') of the model",
                key="experts_implementation",
            )
        numbers = [mixture.first + at for at in index.unique().tolist() if at < mixture.count]
        stand_in = object.__new__(type(module))
        stand_in.__dict__ = {**module.__dict__}
        del stand_in.forward
        # One takes its experts in their order and adds up, the others take all at once.
        is_ordered = chosen in (None, "eager")
        with cache.use(list(mixture.slabs), numbers, is_ordered=is_ordered) as use:
            routed = {name: _Routed(mixture, name, use) for name in mixture.slabs}
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
        rows: Any = None,
        is_turned: bool = False,
    ) -> None:
        whole = mixture.module._parameters[attribute]
        self.dtype = whole.dtype
        self.shape = (*whole.shape[:-2], *(whole.shape[:-3:-1] if is_turned else whole.shape[-2:]))
        self.device = dtypes.import_torch().device("cpu")
        self._of = mixture, attribute, use
        self._rows = rows
        self._is_turned = is_turned

    def __getitem__(self, index: Any) -> Any:
        mixture, attribute, use = self._of
        if index.ndim == 0:
            return use.the(attribute, mixture.first + int(index))
        return _Routed(mixture, attribute, use, index, self._is_turned)

    def transpose(self, *_: int) -> _Routed:
        """With rows and columns swapped, which is all that is asked for."""
        return _Routed(*self._of, self._rows, not self._is_turned)

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del kinds
        torch = dtypes.import_torch()
        if function in (torch._grouped_mm, torch.nn.functional.grouped_mm):
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
        mixture, attribute, use = self._of
        for number, matrix in use.each(attribute):
            yield number - mixture.first, matrix.t() if self._is_turned else matrix

    def _grouped(self, function: Any, inputs: Any, *, offs: Any, **options: Any) -> Any:
        """Products of groups of rows, each with the matrix of its expert."""
        ends = [0, *offs.tolist()]
        outputs = inputs.new_zeros((len(inputs), self.shape[-1]))
        for at, matrix in self._each():
            rows = slice(ends[at], ends[at + 1])
            count = offs.new_tensor([rows.stop - rows.start])
            outputs[rows] = function(inputs[rows], matrix.unsqueeze(0), offs=count, **options)
        return outputs

    def _batched(self, product: Any, inputs: Any, shape: tuple[int, ...]) -> Any:
        """Products of each input with the matrix of its expert."""
        outputs = inputs.new_zeros(shape)
        for at, matrix in self._each():
            mine = (self._rows == at).nonzero().squeeze(-1)
            if len(mine) == 1 < len(inputs):
                # Batches of one go another way, whose bits are others.
                mine = mine.repeat(2)
            matrices = matrix.expand(len(mine), -1, -1).contiguous()
            outputs[mine] = product(matrices, inputs[mine])
        return outputs
