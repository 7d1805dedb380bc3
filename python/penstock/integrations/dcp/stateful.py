"""`skip_plain`: makes DCP ask for the state of those elements only that may have one.

At every save DCP asks each element of a state whether it is `Stateful`, in a call that it logs: 50
to 100 us each, for a background save twice. For thousands of tensors at the top of a state that
takes longer than to copy them.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_NEVER_STATEFUL = frozenset({type(None), bool, int, float, complex, str, bytes, list, tuple, dict})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def skip_plain(theirs: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wraps DCP's `_stateful_to_state_dict`, to call it for what may be `Stateful` only."""
    logger = None
    with contextlib.suppress(ImportError):
        module = import_module("torch.distributed.checkpoint.logger")
        logger = getattr(module, "_dcp_logger", None)

    @wraps(theirs)
    def stateful_to_state_dict(state_dict: Any) -> dict[str, Any]:
        if type(state_dict) not in (dict, OrderedDict) or _has_listeners(logger):
            return theirs(state_dict)
        others = {key: value for key, value in state_dict.items() if _may_be_stateful(value)}
        found = theirs(others) if others else others
        return {key: found.get(key, value) for key, value in state_dict.items()}

    return stateful_to_state_dict


def _may_be_stateful(value: Any) -> bool:
    kind = type(value)
    return kind not in _NEVER_STATEFUL and (kind not in _TENSORS or bool(vars(value)))


def _has_listeners(logger: logging.Logger | None) -> bool:
    """Whether somebody may read DCP's log, in which each element has two entries."""
    return (
        not isinstance(logger, logging.Logger)
        or logger.propagate
        or bool(logger.filters)
        or any(type(handler) is not logging.NullHandler for handler in logger.handlers)
    )
