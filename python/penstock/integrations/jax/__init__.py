"""Pytrees of JAX, saved and loaded with Penstock.

Arrays are written from XLA's memory, each device's part separately, and are loaded with the types,
shardings and containers of ``like``. Nothing is pickled.

Example:
    >>> import jax, jax.numpy as jnp, optax, tempfile
    >>> import penstock.integrations.jax as pj
    >>> params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3, jnp.bfloat16)}
    >>> state = {"params": params, "opt": optax.adam(1e-3).init(params), "key": jax.random.key(0)}
    >>> path = tempfile.mkdtemp() + "/step-100"
    >>> report = pj.save(path, state)
    >>> restored = pj.load(path, like=state)
    >>> type(restored["opt"][0]).__name__, restored["params"]["b"].dtype.name
    ('ScaleByAdamState', 'bfloat16')
"""

from penstock.integrations.jax import fitting
from penstock.integrations.versions import check_version

check_version("jax", "0.6", "0.12")
fitting.check()

from penstock.integrations.jax.checkpoints import Checkpoints  # noqa: E402
from penstock.integrations.jax.loading import load  # noqa: E402
from penstock.integrations.jax.saving import save, save_async, wait  # noqa: E402

__all__ = ["Checkpoints", "load", "save", "save_async", "wait"]
