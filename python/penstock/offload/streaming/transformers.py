"""Models of Hugging Face transformers without their weights, and where those lie."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    CheckpointNotFoundError,
    MissingDependencyError,
    StateMismatchError,
    UnsupportedStateError,
)
from penstock.io.extents import Stored
from penstock.offload.streaming.ties import tied
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from penstock.io.extents import Composed

    Weight = Stored | Composed

_making = threading.Lock()
_SHOWN_MAX = 5


def model_of(directory: str, dtype: Any = None) -> Any:
    """The model that a directory describes, ready to be called but for its weights.

    Args:
        directory: With ``config.json`` and, if there is one, ``generation_config.json``.
        dtype: A `torch.dtype` that it has where its configuration names none.

    Raises:
        MissingDependencyError: transformers is not there.
        CheckpointNotFoundError: There is no configuration.
        UnsupportedStateError: transformers knows no such model, or its weights are quantized.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "models of Hugging Face take transformers: pip install transformers",
            name="transformers",
        ) from error
    if not (Path(directory) / "config.json").is_file():
        raise CheckpointNotFoundError(
            f"{directory}: no config.json is there: name a directory as save_pretrained of"
            " transformers makes it",
            path=directory,
        )
    config = transformers.AutoConfig.from_pretrained(directory)
    names = config.architectures or []
    kind = next(
        (getattr(transformers, name) for name in names if hasattr(transformers, name)), None
    )
    if kind is None:
        raise UnsupportedStateError(
            f"{directory}: transformers {transformers.__version__} knows none of {names}",
            key="architectures",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedStateError(
            f"{directory}: its weights are quantized, which is not supported", key="quantization"
        )
    with _without_memory():
        model = kind._from_config(config, dtype=config.dtype or dtype)
    _keep_precise(model)
    if (Path(directory) / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    model.tie_weights()
    return model.eval()


def dtype_of(tensors: Mapping[str, Weight]) -> Any:
    """The type that transformers has a model in whose configuration names none.

    Args:
        tensors: Of its files, by their names there.
    """
    every = {name: one for name, one in tensors.items() if isinstance(one, Stored)}
    for _, name in sorted((one.path, name) for name, one in every.items()):
        dtype = every[name].dtype
        if dtype.is_floating_point and dtype.itemsize > 1:
            return dtype
    return None


def _keep_precise(model: Any) -> None:
    """Has in 32 bits what transformers keeps so when it loads a model in 16."""
    torch = dtypes.import_torch()
    patterns = model._get_dtype_plan(model.config.dtype)
    if not patterns:
        return
    kept = re.compile("|".join(one.replace("*", ".*") for one in patterns))
    stored = model.state_dict(keep_vars=True)
    for name in filter(kept.search, stored):
        owner, _, attribute = name.rpartition(".")
        module, precise = model.get_submodule(owner), stored[name].detach().float()
        if attribute in module._parameters:
            module._parameters[attribute] = torch.nn.Parameter(precise)
        else:
            module._buffers[attribute] = precise


def untie(model: Any, found: Mapping[str, Weight]) -> None:
    """Has parameters apart that are tied in a model and that its files have each of.

    Transformers ties what the configuration says only if the files do not know better.

    Args:
        model: That a directory describes.
        found: Where each parameter's bytes lie, by its name.
    """
    torch = dtypes.import_torch()
    tied: dict[int, Weight] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in found and tied.setdefault(id(parameter), found[name]) != found[name]:
            owner, _, attribute = name.rpartition(".")
            apart = torch.nn.Parameter(torch.empty_like(parameter))
            model.get_submodule(owner)._parameters[attribute] = apart
            model.all_tied_weights_keys.pop(name, None)


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters that modules make have no memory; buffers have, as some are computed."""
    torch = dtypes.import_torch()
    register = torch.nn.Module.register_parameter
    here = threading.get_ident()

    def register_empty(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and threading.get_ident() == here:
            parameter = torch.nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )
        register(module, name, parameter)

    with _making:
        torch.nn.Module.register_parameter = register_empty
        try:
            yield
        finally:
            torch.nn.Module.register_parameter = register


def blocks_of(model: Any) -> list[str]:
    """Names of the modules that transformers never takes apart: the blocks of the model."""
    kinds = set(model._no_split_modules or ())
    names = [name for name, one in model.named_modules() if type(one).__name__ in kinds]
    # Of blocks in blocks, the outer ones.
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def matched(
    model: Any, found: Mapping[str, Weight], held: Container[str] = ()
) -> dict[str, Weight]:
    """Where the parameters of a model lie, by their names in it, ties included.

    Args:
        model: A module.
        found: What is stored.
        held: Names of parameters that are in memory, and stay.

    Raises:
        StateMismatchError: Some are not there, are of another shape, or two in the files are one
            in the model.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {name: stored for name, stored in found.items() if name in parameters}
    found = tied(parameters, found)
    missing = sorted(name for name in parameters if name not in found and name not in held)
    if missing:
        raise _mismatch("not in the files", missing)
    wrong = [
        name for name, one in found.items() if one.shape_in_model != tuple(parameters[name].shape)
    ]
    if wrong:
        raise _mismatch("of another shape in the files", wrong)
    return found


def _mismatch(text: str, names: list[str]) -> StateMismatchError:
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    shown = ", ".join(names[:_SHOWN_MAX])
    return StateMismatchError(
        f"the model has parameters that are {text}: {shown}{more}", key=names[0]
    )
