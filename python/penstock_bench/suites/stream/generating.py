"""A process that generates text, or makes the model that does.

``python -m penstock_bench.suites.stream.generating`` joins the control group of its job before it
imports anything large, so that all of its memory counts.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from penstock_bench.harness.child import answer, io_counts, join, peak_bytes, read_job

_GROUP_TOKENS = 16
"""Tokens after which text repeats that is made to; vocabularies are multiples of it."""
_EMBEDDING_SCALE = 200
"""Makes the last token outweigh what blocks of random weights add to it."""


def main() -> None:
    """Does what standard input says."""
    job = read_job()
    if "config" in job:
        _make(job)
        answer({})
        return
    from penstock_bench.peers.stream import GENERATORS, Setting

    generator = GENERATORS[job["by"]].make()
    setting = Setting(job["model"], job["place"], job["memory_bytes"])
    if job["is_preparing"]:
        generator.prepare(setting)
        found = {}
    else:
        if generator.joins_early:
            join(job["group"])
        begun = time.perf_counter()
        model = generator.open(setting)
        opened = time.perf_counter() - begun
        if not generator.joins_early:
            join(job["group"])
        found = {"open_seconds": opened, **_generate(model, job), **generator.report()}
    answer(found)


def _make(job: dict[str, Any]) -> None:
    """Makes a model of random weights in bfloat16."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(
        "mixtral" if "num_local_experts" in job["config"] else "llama",
        **job["config"],
        dtype=torch.bfloat16,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    if job["is_repeating"]:
        _repeat(model)
    model.save_pretrained(job["directory"], max_shard_size="1GB")


def _repeat(model: Any) -> None:
    """After each token the next one of its 16 becomes the likeliest, so that guesses can be right.

    Random weights alone make text that does not repeat.
    """
    import torch

    embedding, head = (
        part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    with torch.no_grad():
        groups = embedding.unflatten(0, (-1, _GROUP_TOKENS))
        head.copy_(groups.roll(1, dims=1).flatten(0, 1))
        embedding *= _EMBEDDING_SCALE


def _generate(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    import torch

    at: list[float] = []
    counts: list[int] = []

    class Clock:
        """Is handed the prompt, then the tokens of each pass."""

        def put(self, tokens: Any) -> None:
            at.append(time.perf_counter())
            counts.append(tokens.numel())

        def end(self) -> None:
            """Nothing more."""

    tokens = torch.tensor([job["prompt"]])
    before, cpu = io_counts(), time.process_time()
    begun = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=job["tokens"],
            min_new_tokens=job["tokens"],
            do_sample=False,
            prompt_lookup_num_tokens=job["lookup"] or None,
            return_dict_in_generate=True,
            output_logits=True,
            streamer=Clock(),
        )
    seconds = time.perf_counter() - begun
    cpu_seconds, after = time.process_time() - cpu, io_counts()
    first, *later = at[1:]
    _, _, *pass_tokens = counts
    rows = [one.contiguous().view(torch.uint8).numpy().tobytes() for one in made.logits]
    return {
        "seconds": seconds,
        "first_token_seconds": first - begun,
        "pass_seconds": [b - a for a, b in zip([first, *later], later, strict=False)],
        "pass_tokens": pass_tokens,
        "cpu_seconds": cpu_seconds,
        "read_bytes": after["read_bytes"] - before["read_bytes"],
        # From the beginning of the process: what it wrote to have its weights counts.
        "written_bytes": after["write_bytes"],
        "memory_peak_bytes": peak_bytes(),
        "logits": [hashlib.sha256(row).hexdigest()[:16] for row in rows],
    }


if __name__ == "__main__":
    main()
