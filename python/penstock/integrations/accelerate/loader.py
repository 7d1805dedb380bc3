"""Saves and restores the positions of data loaders prepared by Accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError

if TYPE_CHECKING:
    import torch


def keep_position() -> None:
    """Stops loaders of several ranks from stepping back, as they do in Accelerate 1.6 to 1.12.

    It treated them as reading ahead for other ranks, as a dispatcher does that reads for all, so a
    resumed run trained on some batches twice.
    """
    from accelerate.data_loader import DataLoaderShard

    name = "adjust_state_dict_for_prefetch"
    if name not in vars(DataLoaderShard):
        setattr(DataLoaderShard, name, lambda _: None)


class PreparedLoader:
    """A prepared loader: its epoch, its position if it has one, and the source of its order."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """The loader's present position."""
        sampler, generator = self._sampler(), self._generator()
        state = {
            "epoch": self._loader.iteration + self._is_over(),
            "seed": getattr(sampler, "initial_seed", None),
            "generator": None if generator is None else generator.get_state(),
            "place": None,
        }
        if self._is_stateful:
            state["place"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves the loader to a saved position."""
        loader, place = self._loader, state["place"]
        if self._is_stateful != (place is not None):
            kind = "knew" if place is not None else "did not know"
            raise StateMismatchError(
                f"the loader that was saved {kind} its place: give DataLoaderConfiguration the "
                f"same use_stateful_dataloader, which is {place is not None}"
            )
        sampler, generator = self._sampler(), self._generator()
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"])
        if sampler is not None and state["seed"] is not None:
            sampler.initial_seed = state["seed"]
        # A shuffled sampler derives its order from the epoch, so set it before any use.
        loader.set_epoch(state["epoch"])
        if place is None:
            return
        loader.load_state_dict(place)
        # Otherwise a save before the first batch would store the loader's old position.
        loader.dl_state_dict = place
        # An iterator draws a seed when it is made. Make it now, before the random states are
        # restored, as in the run that was saved; the next epoch uses this iterator.
        loader.base_dataloader.state_dict()

    def loses_order(self) -> bool:
        """Whether it is within an epoch whose order cannot be restored."""
        if not self._is_running() or self._loader.end_of_dataloader:
            return False
        sampler = self._sampler()
        if sampler is None or hasattr(sampler, "initial_seed"):
            return False
        is_shuffled = type(sampler).__name__ == "RandomSampler"
        # An unsharded stateful loader stores the position of torchdata's own sampler.
        place = self._loader.state_dict() if self._is_stateful else {}
        return is_shuffled and place.get("_sampler_iter_state") is None

    @property
    def _is_stateful(self) -> bool:
        return bool(getattr(self._loader, "use_stateful_dataloader", False))

    def _is_running(self) -> bool:
        references = self._loader.gradient_state.dataloader_references
        return any(one is self._loader for one in references)

    def _is_over(self) -> bool:
        """Whether its last batch was handed out while its epoch is not counted yet."""
        return self._is_running() and bool(self._loader.end_of_dataloader)

    def _sampler(self) -> Any:
        if not hasattr(self._loader, "get_sampler"):
            return None
        found = self._loader.get_sampler()
        if found is None:
            # Each of several ranks has a shard of the batches, which wraps the user's sampler.
            shard = self._loader.batch_sampler or self._loader.sampler
            found = getattr(getattr(shard, "batch_sampler", None), "sampler", None)
        return found

    def _generator(self) -> torch.Generator | None:
        found: Any = getattr(self._loader, "synchronized_generator", None)
        if found is None:
            found = getattr(self._sampler(), "generator", None)
        return found if hasattr(found, "get_state") else None
