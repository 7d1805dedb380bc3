"""Hugging Face's Trainer, with Penstock saving and loading its checkpoints.

`enable` does it to a trainer of any class, such as those of TRL; `PenstockTrainerMixin` to a class
of one's own. Directories are called ``checkpoint-N`` as before, and hold one checkpoint each:
weights, optimizer, scheduler, scaler, random states of every rank, and the small files that the
trainer writes beside (its own state, the model's config, the tokenizer). All of it is committed at
once, so a directory is complete or is none.

Checkpoints that the Trainer itself has written are still resumed from, by its own code.

Example::

    from penstock.integrations.transformers import enable

    trainer = enable(transformers.Trainer(model, arguments, train_dataset=rows))
    trainer.train(resume_from_checkpoint=True)
"""

from penstock.integrations.transformers.enable import enable
from penstock.integrations.transformers.mixin import PenstockTrainerMixin
from penstock.integrations.transformers.run import newest_checkpoint
from penstock.integrations.transformers.settings import Settings

__all__ = ["PenstockTrainerMixin", "Settings", "enable", "newest_checkpoint"]
