"""A graph network with its features on storage, which resumes after a kill exactly to the bit.

    python examples/graph_training.py
    python examples/graph_training.py --scale 0.001     # 550,000 nodes, 2.2 GB of features
    python examples/graph_training.py --ordered         # nodes numbered by their edges
    python examples/graph_training.py --workers 2       # processes that sample

The graph has the shape of IGBH: papers, authors, fields of study and institutes. Features are
written once, and gathered during the previous training step. `penstock.Training` holds the model,
the optimizer, dropout's random state and the loader's position, which determines the samples: kill
the program at any moment and start it again, and its losses are those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import HeteroConv, SAGEConv

import penstock
from penstock import features
from penstock.integrations.pyg import FeatureStore, GatherLoader
from penstock.integrations.pyg.synthetic import CLASSES, Igbh

HIDDEN = 32
BATCH = 64
FAN_OUT = [4, 3]


class Network(nn.Module):
    """Two layers of PyG, one convolution for each type of edges."""

    def __init__(self, kinds: Any, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            HeteroConv({kind: SAGEConv((of, of), HIDDEN) for kind in kinds}, aggr="sum")
            for of in (width, HIDDEN)
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, batch: Any) -> torch.Tensor:
        """Returns the class scores of the batch's papers."""
        found = batch.x_dict
        for layer in self.layers:
            found = layer(found, batch.edge_index_dict)
            found = {kind: self.dropout(rows.relu()) for kind, rows in found.items()}
        scores: torch.Tensor = self.head(found["paper"][: batch["paper"].batch_size])
        return scores


def tables(directory: str, made: Igbh, width: int) -> dict[str, features.Features]:
    """Opens each type's features; the first run writes them."""
    cache = features.Cache(sum(made.nodes.values()) // 8 * width * 4)
    found = {}
    for kind, count in made.nodes.items():
        path = os.path.join(directory, f"features-{kind}")
        # A killed run leaves no table or a whole one, and a whole one is not written again.
        with contextlib.suppress(penstock.errors.CheckpointExistsError):
            features.write(path, made.rows(kind, width), shape=(count, width))
        found[kind] = features.open(path, cache=cache)
    for kind in ("fos", "institute"):
        # Small tables that nearly every batch reads.
        found[kind].pin(range(made.nodes[kind]))
    return found


def begin(arguments: argparse.Namespace) -> penstock.Training:
    """Builds a new run; it is the same whether or not the run then resumes an old one."""
    made = Igbh(arguments.scale, is_permuted=not arguments.ordered)
    graph = made.graph()
    held: dict[Any, Any] = {
        (kind, "x"): table for kind, table in tables(arguments.directory, made, 128).items()
    }
    store = FeatureStore({**held, ("paper", "y"): made.labels})
    loader = GatherLoader(
        store,
        graph,
        FAN_OUT,
        ("paper", torch.arange(made.nodes["paper"])),
        batch_size=BATCH,
        shuffle=True,
        num_workers=arguments.workers,
    )
    torch.manual_seed(0)
    model = Network(list(graph.edges), 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return penstock.Training(model=model, optimizer=optimizer, loader=loader)


def train_step(training: penstock.Training, batch: Any) -> float:
    """Runs one step; no line here is about saving or storage."""
    wanted = batch["paper"].y[: batch["paper"].batch_size]
    loss = nn.functional.cross_entropy(training.model(batch), wanted)
    training.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    training.optimizer.step()
    return loss.item()


def main() -> None:
    """Trains to the end."""
    arguments = parse()
    # These settings make a run repeatable to the last bit. Saving needs none of them.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    training = begin(arguments)
    steps = os.path.join(arguments.directory, "steps")
    with penstock.CheckpointStore(steps, keep_last=3) as store:
        step = store.resume(training) or 0
        print(f"resumed from step {step}" if step else "a new run", flush=True)
        while step < arguments.steps:
            # A whole epoch, or its remaining batches after a resume.
            for batch in training.loader:
                loss = train_step(training, batch)
                step += 1
                print(f"step {step}: loss {loss!r}", flush=True)
                if step % arguments.every == 0:
                    store.save_async(step, training, lazy=True)
                if step == arguments.steps:
                    break
    print(f"digest {digest(training)}")


def digest(training: penstock.Training) -> str:
    """SHA-256 over the parameters and the loader's position."""
    found = hashlib.sha256(repr(training.loader.state_dict()).encode())
    for name, value in training.model.state_dict().items():
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "graph_training"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--scale", type=float, default=1e-5, help="of IGBH-full, 2.2 TB of rows")
    parser.add_argument("--ordered", action="store_true", help="nodes numbered by their edges")
    parser.add_argument("--workers", type=int, default=0, help="processes that sample")
    return parser.parse_args()


if __name__ == "__main__":
    main()
