"""Maps stored tensors to the parameters of a transformers model: renames, reorders, splits, stacks.

The `WeightConverter`s of transformers describe the operations that it computes in memory when it
loads a model. This module only finds which bytes of which file belong to which parameter: a
parameter is part of a stored tensor, or has its elements in another order, or stacks the matrices
of experts, which files mostly store as separate tensors. Any other operation is refused.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.io.files.extents import Arrangement, Composed, ParameterPart, TensorExtent

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


def renamed(
    model: Any, tensors: Mapping[str, TensorExtent | Composed]
) -> dict[str, TensorExtent | Composed]:
    """Stored parameters and buffers by their names in the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        dot_natural_key,
        rename_source_key,
    )

    conversions = get_model_conversion_mapping(model)
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    renamings = [one for one in conversions if not isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known = dict(model.named_parameters(remove_duplicate=False))
    known.update(model.named_buffers(remove_duplicate=False))
    found: dict[str, TensorExtent | Composed] = {}
    parts: dict[str, dict[str, list[ParameterPart]]] = {}
    # The order in which transformers stacks the experts.
    for key in sorted(tensors, key=dot_natural_key):
        stored = tensors[key]
        name, pattern = rename_source_key(
            key,
            renamings,  # type: ignore[arg-type]
            converters,
            model.base_model_prefix,
            known,
        )
        if pattern is None or name not in known or isinstance(stored, Composed):
            found[name] = stored
        elif (made := _converted(by_pattern[pattern], name, stored, model)) is not None:
            found.update(made)
        else:
            parts.setdefault(name, {}).setdefault(pattern, []).append(ParameterPart(key, stored))
    for name, pieces in parts.items():
        found[name] = _composed(name, by_pattern[next(iter(pieces))], pieces)
    return found


def whole_ones(
    stored: Mapping[str, TensorExtent | Composed], others: Container[str]
) -> dict[str, TensorExtent]:
    """The parameters that are read as whole tensors."""
    found: dict[str, TensorExtent] = {}
    for name, one in stored.items():
        if name in others:
            continue
        if isinstance(one, Composed):
            raise _unsupported(name, one.slabs[0][0].name)
        found[name] = one
    return found


def _composed(name: str, converter: Any, pieces: Mapping[str, list[ParameterPart]]) -> Composed:
    """The parameter that a converter of transformers makes of several tensors."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    sources = [pieces[one] for one in converter.source_patterns if one in pieces]
    match converter.operations:
        case [MergeModulelist(dim=0)] if len(sources) == 1:
            return _stacked(name, sources)
        case [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return _stacked(name, sources)
    raise _unsupported(name, sources[0][0].name)


def _stacked(name: str, sources: list[list[ParameterPart]]) -> Composed:
    """Stacks slabs, each made of one tensor of each kind."""
    counts = [len(pieces) for pieces in sources]
    slabs = tuple(zip(*sources, strict=False))
    shapes = [[piece.stored.shape for piece in slab] for slab in slabs]
    columns = {shape[1:] for slab in shapes for shape in slab}
    rows = {sum(shape[0] for shape in slab) for slab in shapes if all(slab)}
    if len(set(counts)) > 1 or len(columns) != 1 or len(rows) != 1:
        keys = ", ".join(f"{len(one)} like {one[0].name!r}" for one in sources)
        raise StateMismatchError(
            f"the files do not have alike tensors for each part of {name!r}: {keys}", key=name
        )
    return Composed((counts[0], rows.pop(), *columns.pop()), slabs)


def _unsupported(name: str, key: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"{name!r} is computed from {key!r} and others, which is not supported: load it whole",
        key=name,
    )


def _converted(
    converter: Any, name: str, stored: TensorExtent, model: Any
) -> Mapping[str, TensorExtent] | None:
    """Locations of the parameters that a converter makes of one stored tensor, by their names.

    Args:
        converter: A ``WeightConverter`` of transformers.
        name: The tensor's name after renaming: the first of the converter's targets.
        stored: The tensor.
        model: The model of the parameters.

    Returns:
        None if it needs other tensors too, or an operation that this module does not know.
    """
    targets = list(converter.target_patterns)
    if len(converter.source_patterns) != 1 or targets[0] not in name:
        return None
    before, _, behind = name.partition(targets[0])
    found = {before + target + behind: stored for target in targets[:1]}
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "Chunk":
            parts = _chunks(operation, stored, len(targets))
            if parts is None or len(found) != 1:
                return None
            names = [before + target + behind for target in targets]
            found = dict(zip(names, parts, strict=True))
            continue
        for key, one in found.items():
            how = _arrangement(kind, operation, key, one, model)
            if how is None or one.arrangement is not None:
                return None
            found[key] = dataclasses.replace(one, arrangement=how or None)
    return found if len(found) == len(targets) else None


def _chunks(operation: Any, stored: TensorExtent, count: int) -> list[TensorExtent] | None:
    """Equal parts of a tensor along its first dimension, if these are contiguous in its bytes."""
    is_plain = operation.dim == 0 and operation.num_shards_attribute is None
    if not is_plain or stored.arrangement or not stored.shape or stored.shape[0] % count:
        return None
    shape = (stored.shape[0] // count, *stored.shape[1:])
    nbytes = stored.nbytes // count
    return [stored.part(index * nbytes, shape) for index in range(count)]


def _arrangement(
    kind: str, operation: Any, name: str, stored: TensorExtent, model: Any
) -> Arrangement | tuple[()] | None:
    """The order in which an operation puts the elements; empty for none, None if not known."""
    shape = stored.shape
    if kind == "Transpose":
        wanted = dict(model.named_parameters(remove_duplicate=False)).get(name)
        if operation.check_dims and wanted is not None and tuple(wanted.shape) == shape:
            return ()
        order = list(range(len(shape)))
        first, second = operation.dim0, operation.dim1
        order[first], order[second] = order[second], order[first]
        return Arrangement(shape, tuple(order), tuple(shape[dim] for dim in order))
    if kind == "PermuteForRope":
        return _for_rope(operation, name, shape, model.config)
    if kind == "Conv3dToLinear" and len(shape) == 5:
        return _as_stored(shape, (shape[0], math.prod(shape[1:])))
    if kind == "LinearToConv3d" and len(shape) == 2:
        return _as_stored(shape, (shape[0], operation.in_channels, *operation.kernel_size))
    return None


def _as_stored(shape: tuple[int, ...], wanted: tuple[int, ...]) -> Arrangement | None:
    if math.prod(shape) != math.prod(wanted):
        return None
    return Arrangement(wanted, tuple(range(len(wanted))), wanted)


def _for_rope(
    operation: Any, name: str, shape: tuple[int, ...], config: Any
) -> Arrangement | tuple[()] | None:
    """Swaps pairs of a head's rows with its two halves, or the other way round."""
    layers = operation.permute_layer_names
    if layers is not None and not any(layer in name for layer in layers):
        return ()
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    heads = getattr(config, "num_attention_heads", 1)
    if len(shape) not in (1, 2) or shape[0] % (2 * heads):
        return None
    half = shape[0] // heads // 2
    inner = (2, half) if operation.inverse else (half, 2)
    return Arrangement((heads, *inner, *shape[1:]), (0, 2, 1, *range(3, len(shape) + 2)), shape)
