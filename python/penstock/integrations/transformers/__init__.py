"""Hugging Face's Trainer, with Penstock saving and loading its checkpoints.

`enable` does it to a trainer of any class, such as those of TRL; `PenstockTrainerMixin` to a class
of one's own. Directories are called ``checkpoint-N`` as before, and hold one checkpoint each:
weights, optimizer, scheduler, scaler, random states of every rank, and the small files that the
trainer writes beside (its own state, the model's config, the tokenizer). All of it is committed at
once, so a directory is complete or is none.

Checkpoints that the Trainer itself has written are still resumed from, by its own code.

Example:
    >>> import tempfile, torch, transformers
    >>> from penstock.integrations.transformers import enable
    >>> config = transformers.GPT2Config(
    ...     n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=9, bos_token_id=0,
    ...     eos_token_id=0,
    ... )
    >>> class Rows(torch.utils.data.Dataset):
    ...     def __len__(self):
    ...         return 8
    ...     def __getitem__(self, index):
    ...         ids = torch.arange(index, index + 8) % 9
    ...         return {"input_ids": ids, "labels": ids}
    >>> def begin(directory, steps):
    ...     arguments = transformers.TrainingArguments(
    ...         directory, max_steps=steps, save_steps=2, use_cpu=True, report_to="none",
    ...         disable_tqdm=True, logging_strategy="no",
    ...     )
    ...     model = transformers.GPT2LMHeadModel(config)
    ...     return enable(transformers.Trainer(model, arguments, train_dataset=Rows()))
    >>> directory = tempfile.mkdtemp()
    >>> begin(directory, 2).train().global_step
    2
    >>> begin(directory, 4).train(resume_from_checkpoint=True).global_step
    4
"""

from penstock.integrations.transformers.enable import enable
from penstock.integrations.transformers.mixin import PenstockTrainerMixin
from penstock.integrations.transformers.run import newest_checkpoint
from penstock.integrations.transformers.settings import Settings

__all__ = ["PenstockTrainerMixin", "Settings", "enable", "newest_checkpoint"]
