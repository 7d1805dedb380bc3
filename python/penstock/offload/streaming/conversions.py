"""Parameters that transformers makes of one stored tensor: parts of it, elements rearranged.

What it makes so, `WeightConverter` says by operations. Those that are done here take no other
memory than the parameter's own; of all others `converted` says that it cannot.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from penstock.offload.streaming.stored import Arrangement, Stored

if TYPE_CHECKING:
    from collections.abc import Mapping


def converted(converter: Any, name: str, stored: Stored, model: Any) -> Mapping[str, Stored] | None:
    """Where the parameters lie that a converter makes of a stored tensor, by their names.

    Args:
        converter: A ``WeightConverter`` of transformers.
        name: What the tensor is called by it: the first of its targets.
        stored: The tensor.
        model: That the parameters are of.

    Returns:
        None where it takes other tensors, too, or an operation that is not known here.
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


def _chunks(operation: Any, stored: Stored, count: int) -> list[Stored] | None:
    """Equal parts of it, which are parts of its bytes."""
    is_plain = operation.dim == 0 and operation.num_shards_attribute is None
    if not is_plain or stored.arrangement or not stored.shape or stored.shape[0] % count:
        return None
    shape = (stored.shape[0] // count, *stored.shape[1:])
    nbytes = stored.nbytes // count
    return [
        dataclasses.replace(stored, offset=stored.offset + index * nbytes, shape=shape)
        for index in range(count)
    ]


def _arrangement(
    kind: str, operation: Any, name: str, stored: Stored, model: Any
) -> Arrangement | tuple[()] | None:
    """How an operation has the elements; empty as they are stored, None where that is not known."""
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
    """Rows of each head that lie in pairs, as two halves, or the other way round."""
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
