"""Checks that the plug-in fits the installed JAX."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from penstock.errors import StateMismatchError
from penstock.integrations.versions import Probe, self_check


def check() -> None:
    """Raises `MissingDependencyError` unless JAX has the private names that the plug-in uses."""
    probe = Probe("jax", "penstock.integrations.jax")
    convert = probe.attribute("jax._src.lax.lax", "_convert_element_type")
    probe.signature(convert, "operand", "new_dtype", "weak_type")
    state = probe.attribute("jax._src.distributed", "global_state")
    probe.attribute(state, "client")
    probe.check()


def try_out() -> None:
    """Saves and loads a tiny pytree, if JAX is newer than the versions tested.

    Each process does so by itself, with arrays on its own devices.

    Raises:
        MissingDependencyError: It failed, or another pytree came back.
    """
    self_check("jax", _try_out)


def _try_out() -> None:
    import jax

    # Imported after `check`, as these modules use the names that it looks up.
    from penstock import Saver
    from penstock.integrations.jax.loading import load
    from penstock.integrations.jax.trees import to_state

    pytree = _tiny()
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as directory:
        path = os.path.join(directory, "state")
        Saver(no_dist=True).save(path, to_state(pytree, copies=False))
        found = load(path, like=pytree)
    if str(jax.tree.structure(found)) != str(jax.tree.structure(pytree)):
        raise StateMismatchError("a pytree came back with another structure", path=path)
    for name, one in pytree.items():
        if _facts(found[name]) != _facts(one):
            raise StateMismatchError(f"{name}: a leaf came back otherwise", key=name, path=path)


def _tiny() -> dict[str, Any]:
    """A leaf of each kind that has its own way of being stored."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    devices = np.array(jax.local_devices())
    parts: Any = jax.sharding.PartitionSpec
    spread = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("all",)), parts("all"))
    return {
        "spread": jax.device_put(jnp.arange(2.0 * devices.size), spread),
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        # Weakly typed, like a number of Python.
        "weak": jnp.asarray(0.5),
        "key": jax.random.key(7),
        "step": 1,
    }


def _facts(leaf: Any) -> Any:
    """Everything about a leaf that has to come back."""
    import jax
    import numpy as np

    if not isinstance(leaf, jax.Array):
        return leaf
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    content = np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()
    return str(leaf.aval), leaf.sharding, content
