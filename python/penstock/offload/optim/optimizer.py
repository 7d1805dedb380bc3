"""`StoredOptimizer`: makes a PyTorch optimizer keep its moments in files."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from penstock.common.option_kinds import Number
from penstock.common.process import own_rank
from penstock.errors import PenstockError, StateMismatchError, UnsupportedStateError
from penstock.offload.optim.generation import Generation, keys_of
from penstock.offload.optim.host_visit import HostVisit, check_devices, options_on_host
from penstock.offload.optim.layout import ParameterEntry
from penstock.offload.optim.load_state import (
    MASTER,
    STEP,
    assigned_moments,
    count,
    count_step,
    import_moments,
    local_of,
    steps_made,
)
from penstock.offload.optim.shares import SteppedParameter, assigned_of, flat_gradient, shares_of
from penstock.offload.optim.state import StoredState
from penstock.tensors.arguments import decode_local_path
from penstock.tensors.gc_paused import gc_paused
from penstock.tensors.torch_names import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._native import AttemptKey
    from penstock.io.digested_file import DigestedFile
    from penstock.offload.optim.chunk_pipeline import Task
    from penstock.offload.optim.layout import StateSegment, Window
    from penstock.offload.optim.shares import ParameterShares
    from penstock.tensors.file_tensor import FileTarget

MEMORY_BYTES = 256 << 20
_MEMORY = Number(1, (1 << 63) - 1, "bytes", is_open=False)
_HALVES = (torch.float16, torch.bfloat16)
_KINDS = ("fused", "capturable")
"""Options that choose where PyTorch's optimizers keep their step counts."""
_TYPES = (torch.float32, torch.float64, *_HALVES)


class StoredOptimizer(torch.optim.Optimizer, ABC):
    """A mix-in before an optimizer of PyTorch, whose moments it keeps in files.

    A subclass names the moments (`_moments_of`), and updates elements (`_update`), each of them
    independently of the others.

    Threads take turns: each step, state and load is complete before the next one begins.
    """

    _NEEDS_COUNT = True
    """Whether PyTorch's optimizer refuses moments without a count of steps."""

    def _open(
        self, directory: Any, memory_bytes: int, masters: bool, sealing: Any, identities: Any
    ) -> None:
        """Opens the state; called after PyTorch's constructor, which registers all parameters."""
        _MEMORY.check("memory_bytes", memory_bytes)
        # Absolute, as the working directory may change later.
        path = os.path.abspath(decode_local_path(directory))
        keys = keys_of(sealing, identities)
        self._masters = bool(masters)
        self._numbers: dict[Any, int] = {}
        # The numbers of parameters whose moments are in files.
        self._kept: set[int] = set()
        entries = self._entries()
        self._stored = StoredState(
            os.path.join(path, f"rank-{own_rank() or 0:05}"),
            memory_bytes,
            is_sealed=keys.sealing is not None,
        )
        self._generation = Generation(type(self).__name__, self._stored, keys)
        self._torn: str | None = None
        # Reentrant, as a closure, a hook or a tensor that is read may ask for the state.
        self._turn = threading.RLock()
        try:
            self._take_in(entries)
        except BaseException:
            self._stored.close()
            raise

    # ---- For subclasses

    @abstractmethod
    def _moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the moments that parameters of a group have."""

    @abstractmethod
    def _update(self, group: dict[str, Any], shares: ParameterShares, scale: Any) -> None:
        """Updates elements of parameters of a group, and their moments, in place."""

    # ---- Parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; see `torch.optim.Optimizer.add_param_group`."""
        # PyTorch's constructor adds the first groups, before `_open`.
        if not hasattr(self, "_stored"):
            super().add_param_group(param_group)
            return
        self._stored.files.check_open()
        with self._turn:
            super().add_param_group(param_group)
            try:
                self._take_in(self._entries())
            except BaseException:
                self.param_groups.pop()
                raise

    def _take_in(self, entries: dict[Any, ParameterEntry]) -> None:
        self._stored.extend(list(entries.values()))
        self._numbers.update((one, entry.number) for one, entry in entries.items())

    def _entries(self) -> dict[Any, ParameterEntry]:
        """Entries of the parameters that have none yet."""
        found: dict[Any, ParameterEntry] = {}
        number = 0
        for index, group in enumerate(self.param_groups):
            moments = self._names_of(group)
            for parameter in group["params"]:
                if parameter in found:
                    raise ValueError(f"parameter {number} (group {index}) is there twice")
                if parameter not in self._numbers:
                    found[parameter] = self._entry(index, number, parameter, moments)
                number += 1
        return found

    def _entry(
        self, group: int, number: int, parameter: Any, moments: tuple[str, ...]
    ) -> ParameterEntry:
        local = local_of(parameter)
        name = f"parameter {number} (group {group})"
        if local.device.type == "meta":
            raise UnsupportedStateError(f"{name} is on meta: it has no values", key=name)
        if local.dtype not in _TYPES or local.layout is not torch.strided:
            raise UnsupportedStateError(
                f"{name} is {local.dtype}, {local.layout}: this optimizer updates dense parameters"
                " of float32, float64, bfloat16 and float16",
                key=name,
            )
        if not local.is_contiguous():
            raise UnsupportedStateError(
                f"{name} is not contiguous: make it so (.contiguous()) before the optimizer",
                key=name,
            )
        return ParameterEntry(number, tuple(local.shape), self._type_of(local), moments)

    def _names_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the moments in files for each parameter of a group."""
        moments = self._moments_of(group)
        return (MASTER, *moments) if self._masters else moments

    def _type_of(self, values: Any) -> Any:
        """The type of a parameter's moments."""
        dtype = values.dtype
        return torch.float32 if self._masters and dtype in _HALVES else dtype

    # ---- Steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step, and commits its state as the next generation, on stable storage.

        Args:
            closure: Computes the loss and the gradients before the step.

        Returns:
            The closure's result; None without one.

        Raises:
            StorageError: There is no room: nothing has changed, and the step can be made again. Or
                the system failed: the next call says whether the step was made.
            CorruptCheckpointError: A file is damaged.
            TamperedError: Somebody without its key has changed a file of a sealed state.
            KmsError: A key management service was not reachable: nothing has changed.
            DeviceError: The current stream of a device is captured into a graph: nothing has
                changed. Or a device has failed, for which PyTorch may raise an error of its own.
            StateMismatchError: A parameter was put into a group since the optimizer was made, or is
                in the groups twice; or a gradient has another shape or type. Nothing has changed.
            PenstockError: An earlier step failed midway, so that some parameters have made it and
                others have not.
        """
        self._check_whole()
        check_devices(one for group in self.param_groups for one in group["params"])
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.to("cpu").item():
            return loss
        with self._turn, torch.no_grad(), gc_paused():
            self._check_whole()
            if live := self._live():
                self._advance(live, scale)
        return loss

    def _check_whole(self) -> None:
        self._stored.files.check_open()
        if self._torn is not None:
            raise PenstockError(
                f"{self._torn}: load the last checkpoint, model and optimizer, to go on"
            )

    def _live(self) -> dict[int, SteppedParameter]:
        """Parameters that have a gradient or assigned moments, by their numbers."""
        found = {}
        numbers = dict(self._parameters())
        for index, group in enumerate(self.param_groups):
            moments = self._names_of(group)
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                number = numbers[parameter]
                made = steps_made(number, state)
                assigned = self._assigned(number, state)
                if parameter.grad is None and not assigned:
                    continue
                values = local_of(parameter)
                gradient = None if parameter.grad is None else local_of(parameter.grad)
                self._check_like(index, number, parameter, values, moments)
                if assigned and made is None:
                    made = self._count_without(number)
                if MASTER in moments and made is not None and number not in self._kept:
                    assigned.setdefault(MASTER, values)
                found[number] = SteppedParameter(
                    index,
                    values.view(-1),
                    flat_gradient(number, gradient, values),
                    self.state[parameter],
                    made,
                    {name: one.reshape(-1) for name, one in assigned.items()},
                )
        return found

    def _number_of(self, parameter: Any) -> int:
        """The number of a parameter that the optimizer was made for."""
        number = self._numbers.get(parameter)
        if number is None:
            raise StateMismatchError(
                f"a parameter of shape {list(parameter.shape)} was put into a group since the"
                " optimizer was made: add parameters by add_param_group, or make a new optimizer",
                key="param_groups",
            )
        return number

    def _assigned(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Moments that the caller has put into the state of a parameter."""
        entry = self._stored.entry_of(number)
        return assigned_moments(entry, state, is_kept=number in self._kept)

    def _count_without(self, number: int) -> float:
        """The count of a parameter whose moments were assigned without one."""
        if self._NEEDS_COUNT:
            raise StateMismatchError(
                f"the state of parameter {number} has moments and no {STEP!r}: assign it too",
                key=f"{number}.{STEP}",
            )
        return 0.0

    def _check_like(
        self, group: int, number: int, parameter: Any, values: Any, moments: tuple[str, ...]
    ) -> None:
        """That a parameter is still what its state was made for."""
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients: parameter {number}"
            )
        entry = self._stored.entry_of(number)
        if (
            values.shape == entry.shape
            and self._type_of(values) is entry.dtype
            and moments == entry.moments
            and not values.is_meta
            and values.layout is torch.strided
            and values.is_contiguous()
        ):
            return
        now = self._entry(group, number, parameter, moments)
        raise StateMismatchError(
            f"parameter {number} or its group has changed since the optimizer was made"
            f" ({entry.shape}, {entry.dtype}, {entry.moments}; now {now.shape}, {now.dtype},"
            f" {now.moments}): make a new optimizer",
            key=str(number),
        )

    def _advance(self, live: dict[int, SteppedParameter], scale: Any) -> None:
        begun = is_updated = False
        # First, as a key management service may be away, and nothing has changed yet.
        key = self._generation.draw_key()
        scale = None if scale is None else scale.to("cpu")
        options = [options_on_host(group) for group in self.param_groups]

        def prepare(
            task: Task, window: Window, parts: list[Any]
        ) -> tuple[HostVisit, list[tuple[Any, Any]]]:
            names = task.segment.moments
            visit = HostVisit(shares_of(window, parts, names, live), has_masters=self._masters)
            return visit, assigned_of(window, parts, names, live)

        def work(prepared: tuple[HostVisit, list[tuple[Any, Any]]]) -> None:
            nonlocal begun
            visit, assigned = prepared
            shares = visit.wait()
            for moments, values in assigned:
                moments.copy_(values)
            begun = True
            self._work(shares, options, scale)
            visit.leave()

        def commit(path: str) -> None:
            nonlocal is_updated
            is_updated = True
            count_step(live.values())
            self._commit(path, key)

        try:
            self._stored.advance(live, prepare, work, commit)
        except BaseException as error:
            failed = f"({type(error).__name__}: {error})"
            if is_updated:
                self._torn = f"a step was made, but not committed {failed}"
            elif begun:
                self._torn = (
                    f"a step failed in its middle {failed}, so some parameters have made it and"
                    " others have not"
                )
            raise

    def _work(
        self,
        shares: dict[tuple[int, bool], ParameterShares],
        options: list[dict[str, Any]],
        scale: Any,
    ) -> None:
        for (group, is_first), share in shares.items():
            if is_first:
                # New files are zeros already, unless the caller has removed the parameter's state
                # since.
                for some in share.moments.values():
                    torch._foreach_zero_(some)
            values = share.values
            if (masters := share.moments.pop(MASTER, None)) is not None:
                if is_first:
                    torch._foreach_copy_(masters, values)
                pairs = zip(share.gradients, masters, strict=True)
                share.gradients = [gradient.to(master.dtype) for gradient, master in pairs]
                share.values = masters
            self._update(options[group], share, scale)
            if masters is not None:
                torch._foreach_copy_(values, masters)

    # ---- State

    def _commit(self, path: str, key: AttemptKey | None) -> None:
        """Commits the moments, with the steps of each parameter, as a generation."""
        steps = {
            number: float(self.state[parameter][STEP])
            for parameter, number in self._numbers.items()
            if STEP in self.state.get(parameter, {})
        }
        self._kept = set(steps)
        self._generation.commit(path, steps, key)

    def state_dict(self) -> dict[str, Any]:
        """The state as PyTorch's optimizer returns it, but with moments that stay in their files.

        These are `penstock.tensors.file_tensor.FileTensor`s and keep the values of this step,
        whatever later steps do. `penstock.save` links their files; pickling turns them into
        tensors.
        """
        with self._turn:
            self._check_whole()
            # Runs before other hooks, so that they see the same state as the caller.
            hook = self.register_state_dict_post_hook(
                lambda _, packed: self._add_moments(packed), prepend=True
            )
            try:
                return super().state_dict()
            finally:
                hook.remove()

    def _add_moments(self, packed: dict[str, Any]) -> None:
        for place, (parameter, number) in enumerate(self._parameters()):
            state = packed["state"].get(place)
            if state is None or STEP not in state:
                continue
            like = parameter if isinstance(parameter, DTensor) else None
            self._assigned(number, state)
            moments = {
                moment: self._stored.tensor(number, moment, like)
                for moment in self._stored.segment_of(number).moments
                # Moments assigned since the last step are in memory.
                if moment not in state and number in self._kept
            }
            packed["state"][place] = {**state, STEP: count(state[STEP]), **moments}

    def _parameters(self) -> list[tuple[Any, int]]:
        """The parameters in the order of the groups, with their numbers; raises on duplicates."""
        found: dict[Any, int] = {}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter in found:
                    # PyTorch would step it twice, the second time with the moments of the first.
                    raise StateMismatchError(
                        f"parameter {found[parameter]} is in the groups twice, the second time in"
                        f" group {index}: take it out there",
                        key="param_groups",
                    )
                found[parameter] = self._number_of(parameter)
        return list(found.items())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state with moments in memory or in files, and commits it as the next generation.

        Raises:
            StateMismatchError: It is of another optimizer, or of other parameters; the old state
                stays.
            StorageError: There is no room for it; the old state stays. Or it cannot be committed:
                the next call says so.
            KmsError: A key management service was not reachable; the old state stays.
        """
        self._stored.files.check_open()
        with self._turn, gc_paused():
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        files: dict[StateSegment, list[DigestedFile]] = {}
        kinds: list[dict[str, Any]] = []
        counts: dict[Any, float] = {}
        key: AttemptKey | None = None

        def take_in(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            nonlocal key
            self._check_groups(given["param_groups"])
            key = self._generation.draw_key()
            own = self._parameters()
            plain, state_import = import_moments(self._stored, own, given)
            theirs = [one for group in given["param_groups"] for one in group["params"]]
            for place, (parameter, _) in zip(theirs, own, strict=False):
                if place in plain:
                    counts[parameter] = plain[place]["step"]
            # Does everything that may fail before PyTorch changes anything.
            files.update({} if state_import is None else state_import.finish())
            kinds.extend(
                {name: one[name] for name in _KINDS if name in one} for one in given["param_groups"]
            )
            # Otherwise PyTorch moves each count to the device of its parameter.
            groups = [
                {**one, **dict.fromkeys(kind)}
                for one, kind in zip(given["param_groups"], kinds, strict=True)
            ]
            return {**given, "state": plain, "param_groups": groups}

        def adopt(_: Any) -> None:
            for group, kind in zip(self.param_groups, kinds, strict=True):
                group.update(kind)
            for parameter, state in self.state.items():
                state["step"] = count(counts[parameter])
            self._torn = "a state was loaded, but not committed"
            self._stored.adopt(files, lambda path: self._commit(path, key))
            self._torn = None

        # After other pre-hooks of a load, and before its other post-hooks.
        hooks = (
            self.register_load_state_dict_pre_hook(take_in),
            self.register_load_state_dict_post_hook(adopt, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_groups(self, given: list[dict[str, Any]]) -> None:
        """Raises unless the options of a state call for the optimizer's moments."""
        for index, (own, theirs) in enumerate(zip(self.param_groups, given, strict=False)):
            try:
                moments = self._names_of(theirs)
            except ValueError as error:
                raise StateMismatchError(
                    f"group {index} of the state: {error}", key=f"param_groups.{index}"
                ) from None
            numbers = (self._number_of(parameter) for parameter in own["params"])
            if any(self._stored.entry_of(number).moments != moments for number in numbers):
                has = self._names_of(own)
                raise StateMismatchError(
                    f"group {index} of the state is of an optimizer that keeps"
                    f" {', '.join(moments)} of each parameter, this one keeps {', '.join(has)}:"
                    " make it with the options of that one (amsgrad)",
                    key=f"param_groups.{index}",
                )

    def recover(self) -> bool:
        """Takes over the generation that an earlier run has left in the directory.

        It holds the last step that returned, or the one being made when the run ended. Call it
        before the first step. With masters the parameters get their values of that step; without,
        set them before, as the generation does not store them.

        Its files are read and compared with their digests; their bytes are not written again,
        unless the parameters have another order or grouping.

        Each rank recovers its own generation, and after a crash some may be a step ahead of others:
        compare the steps in their `state`, and load a checkpoint if they differ.

        Returns:
            Whether there was a generation.

        Raises:
            StateMismatchError: It is of another optimizer, other parameters, or another number of
                ranks.
            CorruptCheckpointError: It is damaged.
            NotSealedError: The optimizer has ``sealing=``, and it is clear.
            SealedError: It is sealed, and the optimizer has no ``sealing=``, or no identities.
            WrongKeyError: The identities do not open it.
            TamperedError: Somebody without its key has changed it.
        """
        self._stored.files.check_open()
        with self._turn, gc_paused():
            return self._recover()

    def _recover(self) -> bool:
        found = self._generation.recover(self._stored.files.generation, len(self._numbers))
        if found is None:
            return False
        places = {number: place for place, (_, number) in enumerate(self._parameters())}
        state = {
            places[number]: {**found.moments[number], STEP: step}
            for number, step in found.steps.items()
        }
        groups = super().state_dict()["param_groups"]
        self.load_state_dict({"state": state, "param_groups": groups})
        if self._masters:
            self._fill_parameters()
        return True

    @torch.no_grad()
    def _fill_parameters(self) -> None:
        for parameter, number in self._numbers.items():
            if "step" in self.state.get(parameter, {}):
                self._stored.copy_to(local_of(parameter), number, MASTER)

    def _file_target(
        self, parameter: Any, key: str, dtype: Any, shape: tuple[int, ...]
    ) -> FileTarget | None:
        """The target of a load for a moment of a parameter; None for values that stay in memory."""
        number = self._number_of(parameter)
        if key not in self._stored.segment_of(number).moments:
            return None
        like = parameter if isinstance(parameter, DTensor) else None
        return self._stored.target(number, key, like)

    def __reduce__(self) -> Any:
        raise UnsupportedStateError(
            "an optimizer whose state lies in files is not copied: save its state_dict()",
            key="optimizer",
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()

    def close(self) -> None:
        """Releases files, threads and memory; no step can be made afterwards.

        The last generation stays, and checkpoints have their own links.
        """
        with self._turn:
            self._stored.close()
