"""One process that generates text: ``python -m penstock_bench.suites.stream.generating``.

It reads a job as JSON and prints, as the last line, what came of it. It joins the control group of
the job before it imports anything large, so that all of its memory counts.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

from penstock_bench.harness.usage import counted, join, peak_bytes


def main() -> None:
    """Does what standard input says."""
    job = json.loads(sys.stdin.read())
    from penstock_bench.peers.stream import GENERATORS
    from penstock_bench.peers.stream.base import Setting

    generator = GENERATORS[job["by"]].generator()
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
        found = {"open_seconds": opened, **_generate(model, job), **generator.told()}
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()


def _generate(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    import torch

    at: list[float] = []

    class Clock:
        """Is handed the prompt, then each token."""

        def put(self, _: Any) -> None:
            at.append(time.perf_counter())

        def end(self) -> None:
            """Nothing more."""

    tokens = torch.tensor([job["prompt"]])
    before, cpu = counted(), time.process_time()
    begun = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=job["tokens"],
            min_new_tokens=job["tokens"],
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            streamer=Clock(),
        )
    seconds = time.perf_counter() - begun
    cpu_seconds, after = time.process_time() - cpu, counted()
    first, *later = at[1:]
    rows = [one.contiguous().view(torch.uint8).numpy().tobytes() for one in made.logits]
    return {
        "seconds": seconds,
        "first_token_seconds": first - begun,
        "token_seconds": [b - a for a, b in zip([first, *later], later, strict=False)],
        "cpu_seconds": cpu_seconds,
        "read_bytes": after["read_bytes"] - before["read_bytes"],
        # From the beginning of the process: what it wrote to have its weights counts.
        "written_bytes": after["write_bytes"],
        "memory_peak_bytes": peak_bytes(),
        "logits": [hashlib.sha256(row).hexdigest()[:16] for row in rows],
    }


if __name__ == "__main__":
    main()
