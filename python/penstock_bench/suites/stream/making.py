"""A process that makes a model of random weights: ``-m penstock_bench.suites.stream.making``."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Makes the one that standard input asks for, in bfloat16."""
    job = json.loads(sys.stdin.read())
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
    model.save_pretrained(job["directory"], max_shard_size="1GB")
    sys.stdout.write("\n{}\n")


if __name__ == "__main__":
    main()
