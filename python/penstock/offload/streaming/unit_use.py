"""`UnitUse`: hooks that load a unit's weights around calls of a module, and refuse other uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from penstock.errors import UnsupportedStateError
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.offload.streaming.streamer import Streamer

_KEPT = "_penstock_is_streamed"


class UnitUse:
    """Loads the weights of a unit before each call of a module, and leaves the unit after it."""

    def __init__(self, module: Any, streamer: Streamer, index: int, place: int) -> None:
        self._streamer = streamer
        self._index = index
        self._place = place
        # Only code between the hooks is compiled.
        disable = dtypes.import_torch().compiler.disable
        module.register_forward_pre_hook(disable(self.before), prepend=True, with_kwargs=True)
        handle = module.register_forward_hook(disable(self.behind))
        self._behind_id = handle.id
        call = module._call_impl

        def called(*args: Any, **kwargs: Any) -> Any:
            depth = streamer.depth
            try:
                return call(*args, **kwargs)
            except BaseException:
                # After a KeyboardInterrupt PyTorch calls no hooks, not even those with always_call.
                streamer.go_back(depth)
                raise

        module._call_impl = disable(called, recursive=False)

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs before a call: enters the unit."""
        torch = dtypes.import_torch()
        if torch.is_grad_enabled() and _is_any_asked([*args, *kwargs.values()], torch):
            raise UnsupportedStateError(
                "a streamed model has no gradients, as its weights are gone when they would be"
                " computed: call it under torch.no_grad() or torch.inference_mode()",
                key=self._name,
            )
        # First before and last after the call, so that other hooks find the weights, also hooks
        # registered later.
        if next(reversed(module._forward_hooks)) != self._behind_id:
            module._forward_hooks.move_to_end(self._behind_id)
        self._streamer.enter(self._index, self._place)

    def behind(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Runs after a call: leaves the unit."""
        del module, args
        output = self._streamer.lasting(self._index, output)
        self._streamer.leave(self._index)
        return output

    @property
    def _name(self) -> str:
        return self._streamer.units[self._index].name


def check_is_whole(model: Any) -> None:
    """Raises `UnsupportedStateError` if a module of a model is streamed already."""
    for name, module in model.named_modules():
        if _KEPT in vars(module):
            raise UnsupportedStateError(
                f"{name or type(model).__name__!r} is streamed already: make the model anew to"
                " stream it otherwise",
                key=name or "model",
            )


def keep_as_it_is(module: Any) -> None:
    """Refuses to move, convert, fill, train or copy parameters that are in storage."""
    torch = dtypes.import_torch()

    def apply(function: Callable[[Any], Any], recurse: bool = True) -> Any:
        del recurse
        for parameter in module.parameters():
            # An empty tensor of that type and device: nothing is allocated there.
            probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            changed = function(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                place = "the CPU" if probe.device.type == "cpu" else str(probe.device)
                raise UnsupportedStateError(
                    f"a streamed model stays on {place} and in its type, {probe.dtype}:"
                    " convert the files, stream it with device=, or load it whole",
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

    setattr(module, _KEPT, True)
    module._apply = apply
    module.requires_grad_ = requires_grad
    module.load_state_dict = refuse("filled")
    module.__deepcopy__ = refuse("copied")
    module.__reduce_ex__ = refuse("pickled")


def _is_any_asked(values: Iterable[Any], torch: Any) -> bool:
    """Whether a tensor among some values, or in a list of them, requires gradients."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, list | tuple) and _is_any_asked(value, torch):
            return True
    return False
