"""Rows of tables that need not fit into memory, read by id."""

from __future__ import annotations

from penstock.features.cache import Cache
from penstock.features.features import Features, FeaturesStats
from penstock.features.pending import PendingRows

__all__ = ["Cache", "Features", "FeaturesStats", "PendingRows"]
