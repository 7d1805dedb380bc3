"""`Use`: the calls of a module, for which its weights are brought; what else is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from penstock.errors import UnsupportedStateError
from penstock.state import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.offload.streaming.streamer import Streamer


class Use:
    """Has the weights of a unit there while a module is called.

    Args:
        module: The module.
        streamer: That has them.
        index: Of the unit.
    """

    def __init__(self, module: Any, streamer: Streamer, index: int) -> None:
        self._streamer = streamer
        self._index = index
        # What is compiled is what is called between them.
        disable = dtypes.import_torch().compiler.disable
        module.register_forward_pre_hook(disable(self.before), prepend=True, with_kwargs=True)
        handle = module.register_forward_hook(disable(self.behind), always_call=True)
        self._behind_id = handle.id

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins."""
        torch = dtypes.import_torch()
        if torch.is_grad_enabled() and _is_any_asked([*args, *kwargs.values()], torch):
            raise UnsupportedStateError(
                "a streamed model has no gradients, as its weights are gone when they would be"
                " computed: call it under torch.no_grad() or torch.inference_mode()",
                key=self._name,
            )
        # First of all before and last of all behind, so that hooks of others find the weights, also
        # those that came later.
        if next(reversed(module._forward_hooks)) != self._behind_id:
            module._forward_hooks.move_to_end(self._behind_id)
        self._streamer.enter(self._index)

    def behind(self, *_: Any) -> None:
        """A call has ended, well or not."""
        self._streamer.leave(self._index)

    @property
    def _name(self) -> str:
        return self._streamer.units[self._index].name


def keep_as_it_is(module: Any) -> None:
    """Refuses what would move, convert, fill, train or copy parameters that are not there."""
    torch = dtypes.import_torch()

    def apply(function: Callable[[Any], Any], recurse: bool = True) -> Any:
        del recurse
        for parameter in module.parameters():
            probe = torch.empty(0, dtype=parameter.dtype)
            changed = function(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                raise UnsupportedStateError(
                    f"a streamed model stays on the CPU and in its type, {probe.dtype}: convert"
                    " the files, or load it whole",
                    key="model",
                )
        return module

    def refuse(what: str) -> Callable[..., NoReturn]:
        def refused(*_: Any, **__: Any) -> NoReturn:
            raise UnsupportedStateError(
                f"a streamed model cannot be {what}, as its weights are in storage: copy and save"
                " the files that it was made of, and stream those",
                key="model",
            )

        return refused

    def requires_grad(requires_grad: bool = True) -> Any:
        if requires_grad:
            refuse("trained")()
        return module

    module._apply = apply
    module.requires_grad_ = requires_grad
    module.load_state_dict = refuse("filled")
    module.__deepcopy__ = refuse("copied")
    module.__reduce_ex__ = refuse("pickled")


def _is_any_asked(values: Iterable[Any], torch: Any) -> bool:
    """Whether a tensor among some values, or in a list of them, has to have gradients."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, list | tuple) and _is_any_asked(value, torch):
            return True
    return False
