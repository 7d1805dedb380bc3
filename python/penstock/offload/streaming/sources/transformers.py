"""Builds models of Hugging Face transformers without weights, and matches stored tensors."""

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
from penstock.io.files.extents import TensorExtent
from penstock.offload.streaming.sources.ties import tied
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from penstock.io.files.extents import Composed

    Weight = TensorExtent | Composed

_making = threading.Lock()
_SHOWN_MAX = 5


def model_of(directory: str, dtype: Any = None) -> Any:
    """Builds the model that a directory describes, without memory for its weights.

    ``dtype`` is for a configuration that names none.
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
    """The type that transformers gives a model whose configuration names none."""
    every = {name: one for name, one in tensors.items() if isinstance(one, TensorExtent)}
    for _, name in sorted((one.path, name) for name, one in every.items()):
        dtype = every[name].dtype
        if dtype.is_floating_point and dtype.itemsize > 1:
            return dtype
    return None


def _keep_precise(model: Any) -> None:
    """Sets parameters to 32 bits that transformers keeps so when it loads a 16-bit model."""
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
    """Unties parameters of a model that its files store separately.

    Transformers ties what the configuration says, unless the files have different tensors.
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
    """Makes modules with parameters without memory; buffers have some, as they may be computed."""
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
    """Names of the model's blocks: the modules that transformers never splits."""
    kinds = set(model._no_split_modules or ())
    names = [name for name, one in model.named_modules() if type(one).__name__ in kinds]
    # Only the outer one of nested blocks.
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def matched(
    model: Any, found: Mapping[str, Weight], held: Container[str] = ()
) -> dict[str, Weight]:
    """Locates the parameters of a model, by their names in it, including tied ones."""
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
