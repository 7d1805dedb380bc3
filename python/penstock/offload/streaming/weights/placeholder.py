"""`placeholder`: takes the place of a parameter while its bytes are in storage."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from penstock.errors import UnsupportedStateError
from penstock.tensors import dtypes


def placeholder(name: str, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """A parameter without memory: computing with it, or copying it, raises.

    A tensor of the device ``"meta"`` would not do: computing with it gives results silently, and
    callers that move inputs to the parameters' device would move them there, too.
    """
    kind = _kind()
    made = kind._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)
    made._is_param = True
    made._name_in_model = name
    return made


@functools.cache
def _kind() -> Any:
    torch = dtypes.import_torch()

    class InStorage(torch.Tensor):  # type: ignore[misc, name-defined]
        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(
            cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> NoReturn:
            del function, kinds
            every = [*args, *(kwargs or {}).values()]
            lists = [one for one in every if isinstance(one, list | tuple)]
            inner = [one for each in lists for one in each]
            raise _refusal(next(one for one in [*every, *inner] if isinstance(one, cls)))

        def __repr__(self, **_: Any) -> str:
            return f"<{self._name_in_model}: {tuple(self.shape)}, {self.dtype}, in storage>"

        def __deepcopy__(self, memory: Any) -> NoReturn:
            raise _refusal(self)

        def __reduce_ex__(self, protocol: Any) -> NoReturn:
            raise _refusal(self)

        def _refuse(self, *_: Any, **__: Any) -> NoReturn:
            raise _refusal(self)

        # Refuses access to an address, which would be null.
        data_ptr = untyped_storage = storage = numpy = tolist = _refuse
        __array__ = __dlpack__ = requires_grad_ = _refuse

    return InStorage


def _refusal(one: Any) -> UnsupportedStateError:
    name = one._name_in_model
    return UnsupportedStateError(
        f"{name!r} is in storage: a streamed model has it in memory only while the block is called"
        " that has it; copy and save the files that the model was made of",
        key=name,
    )
