"""A run of JAX that may be killed at any moment and still ends with the same bits.

    python examples/jax_training.py

Parameters, optax's state, dropout's key and the position in the data are one pytree, saved in the
background during training. Start the program again after a kill: it resumes from the newest good
step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from penstock.integrations.jax import Checkpoints

WIDTH = 64
SAMPLES = 512
BATCH = 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))


def begin() -> dict[str, Any]:
    """Returns the state of a new run."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (WIDTH, 2 * WIDTH)) / 8,
        "out": jax.random.normal(keys[1], (2 * WIDTH, WIDTH)) / 8,
    }
    place = {"epoch": 0, "position": 0}
    return {"params": params, "opt": OPTIMIZER.init(params), "key": keys[2], "place": place}


def batch(place: dict[str, int]) -> tuple[np.ndarray, dict[str, int]]:
    """Returns the next samples and the position after them."""
    order = np.random.default_rng(place["epoch"]).permutation(SAMPLES)
    indices = order[place["position"] : place["position"] + BATCH]
    position = place["position"] + BATCH
    following = {"epoch": place["epoch"], "position": position}
    if position >= SAMPLES:
        following = {"epoch": place["epoch"] + 1, "position": 0}
    values = np.sin(indices[:, None] * np.arange(1, WIDTH + 1) / 7)
    return values.astype(np.float32), following


# The new parameters reuse the old ones' memory, unless a save still reads it.
@partial(jax.jit, donate_argnums=(0, 1, 2))
def update(params: Any, opt: Any, key: jax.Array, samples: jax.Array) -> tuple[Any, ...]:
    """One update of the parameters."""
    key, own = jax.random.split(key)

    def loss(params: Any) -> jax.Array:
        hidden = jax.nn.gelu(samples @ params["in"])
        hidden *= jax.random.bernoulli(own, 0.9, hidden.shape)
        return jnp.square(hidden @ params["out"] - samples[:, ::-1]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, opt = OPTIMIZER.update(gradients, opt, params)
    return optax.apply_updates(params, updates), opt, key, value


def train_step(state: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Runs one step and returns its loss."""
    samples, place = batch(state["place"])
    params, opt, key, loss = update(state["params"], state["opt"], state["key"], samples)
    return {"params": params, "opt": opt, "key": key, "place": place}, float(loss)


def digest(state: dict[str, Any]) -> str:
    """SHA-256 over the whole state."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves({**state, "key": jax.random.key_data(state["key"])}):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def main() -> None:
    """Trains to the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "jax"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    arguments = parser.parse_args()
    with Checkpoints(arguments.directory, keep_last=3) as checkpoints:
        step, state = checkpoints.resume(begin()) or (0, begin())
        print(f"resumed from step {step}" if step else "a new run", flush=True)
        while step < arguments.steps:
            state, loss = train_step(state)
            step += 1
            print(f"step {step}: loss {loss:.4f}", flush=True)
            if step % arguments.every == 0:
                checkpoints.save_async(step, state)
    print(f"digest {digest(state)}")


if __name__ == "__main__":
    main()
