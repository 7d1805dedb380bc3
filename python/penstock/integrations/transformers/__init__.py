"""Hugging Face's Trainer, with Penstock saving and loading its checkpoints.

Use `attach` for a trainer of any class, such as those of TRL, or `PenstockTrainerMixin` in your own
class. Directories are named ``checkpoint-N`` as before, and hold one checkpoint each: weights,
optimizer, scheduler, scaler, random states of every rank, and the trainer's small files (its own
state, the model's config, the tokenizer). All of it is committed at once, so a checkpoint is
complete or absent.

Checkpoints that the Trainer itself has written are resumed by its own code.

Example::

    from penstock.integrations.transformers import attach

    trainer = attach(transformers.Trainer(model, arguments, train_dataset=rows))
    trainer.train(resume_from_checkpoint=True)
"""

from penstock.integrations.transformers.attach import attach
from penstock.integrations.transformers.mixin import PenstockTrainerMixin
from penstock.integrations.transformers.run import newest_checkpoint
from penstock.integrations.transformers.settings import Settings

__all__ = ["PenstockTrainerMixin", "Settings", "attach", "newest_checkpoint"]
