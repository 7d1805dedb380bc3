"""Hugging Face Accelerate: ``save_state`` and ``load_state`` by Penstock, in one commit.

`enable` is all there is to call. Models, optimizers, schedulers, the scaler, the loaders' places,
what was given to ``register_for_checkpointing`` and the random states of every rank are one
checkpoint, complete or not there. What is missing when it is loaded is an error. Checkpoints that
Accelerate wrote itself are loaded by its own code.

Example:
    >>> import tempfile, accelerate, torch
    >>> from penstock.integrations.accelerate import enable
    >>> accelerator = enable(accelerate.Accelerator(cpu=True))
    >>> model = accelerator.prepare(torch.nn.Linear(2, 2))
    >>> path = accelerator.save_state(tempfile.mkdtemp() + "/checkpoint")
    >>> with torch.no_grad():
    ...     _ = model.weight.zero_()
    >>> accelerator.load_state(path)
    >>> bool(model.weight.any())
    True
"""

from penstock.integrations.accelerate.enable import enable

__all__ = ["enable"]
