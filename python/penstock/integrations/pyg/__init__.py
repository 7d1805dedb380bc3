"""PyTorch Geometric, with node features in tables that need not fit into memory.

`FeatureStore` holds features on storage and in memory, `Graph` the edges; `NeighborSampler` samples
without PyG's compiled extensions, and `GatherLoader` samples and gathers batches ahead of training.

Example:
    >>> import torch
    >>> from penstock.integrations.pyg import FeatureStore, GatherLoader, Graph
    >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    >>> features = FeatureStore({"x": torch.arange(8.0).view(4, 2)})
    >>> loader = GatherLoader(
    ...     features, Graph(edge_index, 4), [2, 2], torch.arange(4), batch_size=2
    ... )
    >>> [batch.x[:2].tolist() for batch in loader]
    [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]
"""

from penstock.integrations.pyg.feature_store import FeatureStore
from penstock.integrations.pyg.graph import Graph
from penstock.integrations.pyg.loader import GatherLoader
from penstock.integrations.pyg.sampler import NeighborSampler

__all__ = ["FeatureStore", "GatherLoader", "Graph", "NeighborSampler"]
