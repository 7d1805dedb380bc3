"""`Training`: saves and restores everything that has to survive a crash as a whole."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.target import NEW
from penstock.checkpoint.loading.tied import FilledTensor, differences
from penstock.checkpoint.state.check import check_storable
from penstock.checkpoint.state.flatten import flatten
from penstock.checkpoint.state.tree.tree import SKIPPED, Node, branches
from penstock.checkpoint.training import components, filling, randomness
from penstock.checkpoint.training.naming import Names
from penstock.checkpoint.view.live import LiveState
from penstock.errors import PenstockWarning, StateMismatchError, UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.checkpoint.training.component import Component
    from penstock.checkpoint.view.view import View

_RANDOM = "rng"
"""Name of the random generators' states."""

_NAMED_MAX = 8


class Training(LiveState):
    """Everything that a resumed training run needs, in one object to save and restore.

    Any object with ``state_dict`` and ``load_state_dict`` is a part: models, optimizers,
    schedulers, gradient scalers, loaders that know their position, averages of weights; also lists
    and dictionaries of these, and random generators of Python, NumPy and PyTorch. Everything else
    is a plain value, which is an attribute: ``training.epoch += 1``.

    `CheckpointStore.save`, `CheckpointStore.save_async` and `penstock.save` accept it as a state,
    and `CheckpointStore.resume` restores it from the newest good step. The stored form is an
    ordinary state, ``{"model": …, "optimizer": …, "epoch": …}``, which `penstock.load` reads
    without this class.

    Parameters have the same names with any wrappers (`DistributedDataParallel`, `torch.compile`),
    and the moments of an optimizer are stored under these names. A run saved by one process
    therefore continues under DDP or FSDP2, on any number of ranks, and vice versa. Models sharded
    by `torch.distributed.fsdp.fully_shard` are saved and restored in parts: each rank reads the
    part that it holds.

    A PyTorch loader does not know its position: to resume in the middle of an epoch, use one that
    does, such as torchdata's ``StatefulDataLoader``, or a sampler with the two methods.

    Args:
        rng: Whether the random states of the process are saved and restored: those of Python,
            NumPy, PyTorch and its devices, separately for each rank.
        given: The parts and values, by the names under which they are stored.

    Raises:
        TypeError: A name is not allowed.
        UnsupportedStateError: A value, or a value in the state of a part, cannot be stored; the
            message names it. Loaders, and parts without a state so far, are not checked.

    Example:
        >>> import penstock, tempfile, torch
        >>> def begin():
        ...     model = torch.nn.Linear(4, 4)
        ...     optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ...     return penstock.Training(model=model, optimizer=optimizer, epoch=0)
        >>> training = begin()
        >>> store = penstock.CheckpointStore(tempfile.mkdtemp())
        >>> store.resume(training) is None
        True
        >>> training.epoch += 1
        >>> report = store.save(100, training)
        >>> resumed = begin()
        >>> store.resume(resumed), resumed.epoch
        (100, 1)
        >>> torch.equal(resumed.model.weight, training.model.weight)
        True
    """

    _given: dict[str, Any]
    _rng: bool

    def __init__(self, /, *, rng: bool = True, **given: Any) -> None:
        if not isinstance(rng, bool):
            raise TypeError(
                f"rng={rng!r}: says whether random states are saved, True or False; give a "
                "generator another name"
            )
        for name in given:
            if not name.isidentifier() or name.startswith("_") or hasattr(Training, name):
                raise TypeError(f"{name}=: a part cannot have this name: choose another one")
        self.__dict__.update(_given=given, _rng=rng)
        self._check(given)

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("_given", {})
        if name in given:
            return given[name]
        raise AttributeError(f"this training has no {name!r}: it has {', '.join(given) or 'none'}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._given:
            raise AttributeError(
                f"{name!r} would not be saved: give it to Training(…, {name}=…) first"
            )
        self._check({name: value})
        self._given[name] = value

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._given]

    def __repr__(self) -> str:
        names = [*self._given, *([_RANDOM] if self._rng else [])]
        return f"<Training of {', '.join(names) or 'nothing'}>"

    def state_dict(self) -> dict[str, Any]:
        """Returns the current state; tensors are not copied."""
        found = self._parts()
        state = {}
        for name, value in self._given.items():
            part = found[name]
            state[name] = value if part is None else part.capture()
        return state | ({_RANDOM: randomness.capture()} if self._rng else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state returned by `penstock.load`.

        All of the state is compared before anything is changed.

        Raises:
            StateMismatchError: The state does not fit; or a part refused it nevertheless, and the
                message lists the parts already restored.
        """
        for message in self._restore(state):
            warnings.warn(message, PenstockWarning, stacklevel=2)

    # Methods for loads and stores, see `LiveState`.

    def _requested_names(self) -> dict[str, Any]:
        found = self._parts()
        wanted = {
            name: None if part is None else part.requested_names() for name, part in found.items()
        }
        return wanted | ({_RANDOM: None} if self._rng else {})

    def _targets(
        self, node: Node, seen: View, path: str, *, is_partial: bool, is_strict: bool
    ) -> tuple[Node, Any]:
        children = {key: child for key, child in branches(node) or () if child is not SKIPPED}
        self._check_parts(children, path, is_strict=is_strict and not is_partial)
        chosen = {name: children[name] for name in self._names if name in children}
        found = self._parts()
        state: dict[str, Any] = {}
        for name, child in chosen.items():
            part = found.get(name)
            if is_partial and not (part and part.is_model) and filling.has_gaps(child):
                raise StateMismatchError(
                    f"{path}: only some of {name!r} was asked for or is there: a model can be "
                    "restored in part, anything else as a whole; choose all of it or nothing",
                    key=name,
                    path=path,
                )
            if part is None:
                state[name] = filling.like(self._given.get(name), child)
            else:
                state[name] = part.targets(child, seen)
        return chosen, NEW if all(one is NEW for one in state.values()) else state

    def _restore(
        self,
        state: Any,
        *,
        path: str | None = None,
        is_partial: bool = False,
        is_strict: bool = True,
    ) -> list[str]:
        if not isinstance(state, dict):
            raise TypeError(f"the state of a Training is a dict, not {type(state).__name__}")
        self._check_parts(state, path, is_strict=is_strict and not is_partial)
        found = self._parts()
        self._check_fit(found, state, path, is_partial=is_partial)
        # Random states come last: restoring another part may draw numbers.
        names = [name for name in self._names if name in state]
        messages: list[str] = []
        for index, name in enumerate(names):
            part = found.get(name)
            try:
                if part is not None:
                    part.restore(state[name], is_partial=is_partial)
                elif name in self._given:
                    self._given[name] = filling.refilled(self._given[name], state[name])
                else:
                    messages = randomness.restore(state[name])
            except Exception as error:
                done = f"after {', '.join(names[:index])}" if index else "first of all"
                raise StateMismatchError(
                    f"{path or 'this state'}: {name!r} has refused its state, {done}: "
                    f"{type(error).__name__}: {error}; the training is restored in part: build it "
                    "anew",
                    key=name,
                    path=path,
                ) from error
        return messages

    def _optimizers(self) -> list[Any]:
        found = [part for part in self._parts().values() if part is not None]
        return [one.value for part in found for one in part.all() if one.is_optimizer]

    # Internals.

    @property
    def _names(self) -> list[str]:
        return [*self._given, *([_RANDOM] if self._rng else [])]

    def _parts(self) -> dict[str, Component | None]:
        """Returns the part of each name, None for a value; built anew, as users may wrap models."""
        names = Names()
        return {name: components.make(value, name, names) for name, value in self._given.items()}

    def _check(self, given: dict[str, Any]) -> None:
        names = Names()
        for name, value in given.items():
            part = components.make(value, name, names)
            if part is None:
                _check_value(name, value)
            else:
                _check_part(name, part)

    def _check_parts(self, state: Mapping[Any, Any], path: str | None, *, is_strict: bool) -> None:
        """Compares the names of parts with those of a state."""
        names = self._names
        missing = [name for name in names if name not in state]
        # Random states that were not requested are deliberately left.
        further = [name for name in state if name not in names and name != _RANDOM]
        if not is_strict or not (missing or further):
            return
        texts = [f"{name!r} is in the training, not in the checkpoint" for name in missing]
        texts += [f"{name!r} is in the checkpoint, not in the training" for name in further]
        both = "restore those that both have with store.resume(training, strict=False)"
        if missing == [_RANDOM] and not further:
            remedy = (
                "it was saved without random states: build Training(rng=False, …), which neither "
                f"saves nor restores them, or {both}"
            )
        else:
            remedy = f"give Training the same parts, or {both}"
        raise _mismatch(texts, remedy, (missing or further)[0], path)

    def _filled(self, found: dict[str, Component | None], state: Any) -> Iterator[FilledTensor]:
        """Yields the tensors that are filled in place, in the order of `_restore`."""
        for name in self._names:
            if name in state and name in found:
                part = found[name]
                own = filling.filled(self._given[name], state[name])
                for inner, live, stored in own if part is None else part.filled(state[name]):
                    yield FilledTensor(name, inner, live, stored)

    def _check_fit(
        self, found: dict[str, Component | None], state: Any, path: str | None, *, is_partial: bool
    ) -> None:
        """Compares each part with its state."""
        texts = []
        for name, part in found.items():
            if name not in state:
                continue
            if part is None:
                found_texts = filling.differences(self._given[name], state[name])
            else:
                found_texts = part.mismatches(state[name], is_partial=is_partial)
            texts += [(name, f"{name}: {text}") for text in found_texts]
        if not texts:
            texts = [
                (one.part, ": ".join(filter(None, (one.part, one.name, text))))
                for one, text in differences(self._filled(found, state))
            ]
        if texts:
            remedy = "build models and optimizers as the run did that saved it"
            raise _mismatch([text for _, text in texts], remedy, texts[0][0], path)


def _mismatch(texts: Sequence[str], remedy: str, key: str, path: str | None) -> StateMismatchError:
    more = f"; and {len(texts) - _NAMED_MAX} more" if len(texts) > _NAMED_MAX else ""
    return StateMismatchError(
        f"{path or 'this state'} does not fit the training, nothing was changed: "
        f"{'; '.join(texts[:_NAMED_MAX])}{more}; {remedy}",
        key=key,
        path=path,
    )


def _check_value(name: str, value: Any) -> None:
    """Refuses early a value that a save would refuse."""
    if hasattr(value, "dataset") and hasattr(value, "batch_sampler"):
        raise UnsupportedStateError(
            f"{name}: a {type(value).__name__} does not know its place: use torchdata's "
            "StatefulDataLoader, or give a sampler that has state_dict and load_state_dict; or "
            "leave it out and save between epochs, where its order follows from the random states",
            key=name,
        )
    if not filling.holds_sharded(value):
        flatten({name: value})


def _check_part(name: str, part: Component) -> None:
    """Refuses a part whose current state a save would refuse."""
    ends = [one for one in part.all() if not (one.is_model or one.inner)]
    if any(hasattr(one.value, "__iter__") for one in ends):
        # Loaders may start working when asked for their state.
        return
    try:
        state = part.capture()
    except Exception:
        # A part without a state may have one by the first save, which fails otherwise.
        return
    check_storable({name: state})
