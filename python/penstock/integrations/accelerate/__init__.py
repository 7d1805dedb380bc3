"""Hugging Face Accelerate: ``save_state`` and ``load_state`` by Penstock, in one commit.

Call `attach`, and nothing else. Models, optimizers, schedulers, the scaler, the positions of data
loaders, objects given to ``register_for_checkpointing`` and the random states of every rank form
one checkpoint, which is complete or absent. Loading raises if a part is missing. Checkpoints that
Accelerate wrote itself are loaded by its own code.

Example:
    >>> import tempfile, accelerate, torch
    >>> from penstock.integrations.accelerate import attach
    >>> accelerator = attach(accelerate.Accelerator(cpu=True))
    >>> model = accelerator.prepare(torch.nn.Linear(2, 2))
    >>> path = accelerator.save_state(tempfile.mkdtemp() + "/checkpoint")
    >>> with torch.no_grad():
    ...     _ = model.weight.zero_()
    >>> accelerator.load_state(path)
    >>> bool(model.weight.any())
    True
"""

from penstock.integrations.accelerate.attach import attach

__all__ = ["attach"]
