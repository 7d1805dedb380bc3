"""A DCP program that passes no writer and no reader, with Penstock as its storage.

    torchrun --nproc-per-node 2 examples/dcp_enable.py

One line is new: ``enable()``. It does the same for every caller that passes DCP a
``checkpoint_id`` alone: Lightning's FSDP2, Fabric, torchtitan, distributed optimizers of
transformers. Checkpoints that the program saved before it had that line still load.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from penstock.integrations.dcp import enable

if TYPE_CHECKING:
    from concurrent.futures import Future

WIDTH = 256
BATCH = 32


class AppState(Stateful):
    """The application's state, under the name that DCP's tutorial uses."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for DCP to save."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that DCP has loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def main() -> None:
    """Trains, from the newest step if there is one."""
    arguments = parse()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    enable()
    dist.init_process_group("gloo")
    # DCP communicates in a thread of its own during training, so it needs a process group of its
    # own.
    saving_group = dist.new_group(backend="gloo")

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    app = AppState(model, optimizer)

    path = newest(arguments.directory)
    if path is not None:
        dcp.load({"app": app}, checkpoint_id=path)
        tell(f"resumed from step {app.step}")

    saving: Future[Any] | None = None
    while app.step < arguments.steps:
        app.step += 1
        # The batch depends on the step alone.
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(app.step))
        share = batch.chunk(dist.get_world_size())[dist.get_rank()]
        loss = (model(share) - share.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(f"step {app.step}: loss {loss.item():.4f}")

        if app.step % arguments.every == 0 and app.step < arguments.steps:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(
                {"app": app},
                checkpoint_id=arguments.directory / f"step-{app.step:010}",
                process_group=saving_group,
            )
            tell(f"saving step {app.step}")
    if saving is not None:
        saving.result()
    tell(f"digest {digest(app)}")
    dist.destroy_process_group()


def newest(directory: Path) -> Path | None:
    """Returns the newest complete checkpoint. DCP and Penstock both write this file name last."""
    return max((path.parent for path in directory.glob("step-*/.metadata")), default=None)


def digest(app: AppState) -> str:
    """SHA-256 over the model and the optimizer, whole."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, DTensor):
            part = part.full_tensor()
        if isinstance(part, torch.Tensor):
            found.update(part.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                add(str(key))
                add(part[key])
        elif isinstance(part, (list, tuple)):
            for item in part:
                add(item)
        else:
            found.update(repr(part).encode())

    add(app.state_dict())
    return found.hexdigest()


def tell(text: str) -> None:
    """Prints a line, once for all ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("runs", "dcp-enable"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
