"""`penstock generate MODEL`: generates text with a model that need not fit into memory."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.examples import example
from penstock.cli.keys.given import identity_option
from penstock.cli.paths import check_directory
from penstock.cli.units import BYTE_COUNT, Finite
from penstock.common.console import PATH, console, escaped, json_option, print_json
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.offload import StreamReport

    _Ids = click.ParamType[list[int]]
else:
    # `ParamType` is generic for the type checker only: older releases of click lack it.
    _Ids = click.ParamType

JSON_KEYS = """\b
JSON: model, memory_bytes, prompt_ids, ids (generated), text (null without
a tokenizer), seconds, stream_seconds (to make the model),
first_token_seconds, tokens_per_second, and
  report: the result of penstock.offload.report, with roofline_seconds and
    of_roofline.
"""


class _TokenIds(_Ids):
    """Token numbers, separated by commas."""

    name = "ids"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        if isinstance(value, list):
            return value
        texts = str(value).split(",")
        if not all(text.strip().isdecimal() for text in texts):
            self.fail(f"{value!r} is no list of numbers such as 1,2,3", param, ctx)
        return [int(text) for text in texts]


@click.command(
    epilog=example(
        "penstock generate ./llama3-8b --memory 4GB --prompt 'The sea is'", after=JSON_KEYS
    )
)
@click.argument("model", type=PATH)
@click.option(
    "--memory",
    "memory_bytes",
    type=BYTE_COUNT,
    required=True,
    help="Memory for weights: 4GB, 512MiB.",
)
@click.option("--prompt", help="Text to continue.")
@click.option("--prompt-ids", type=_TokenIds(), help="Tokens to continue, by number: 1,2,3.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--lookup",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Guess up to so many tokens from the text so far, and check them in one pass.",
)
@click.option(
    "--temperature",
    type=Finite(min=0),
    default=0.0,
    help="Temperature of random draws; 0 takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=Finite(0, 1, min_open=True),
    help="Draw from the likeliest tokens of this probability.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Seed of random draws.")
@identity_option
@json_option
def generate(
    model: Path,
    memory_bytes: int,
    prompt: str | None,
    prompt_ids: list[int] | None,
    max_new_tokens: int,
    lookup: int,
    temperature: float,
    top_p: float | None,
    seed: int | None,
    identities: tuple[str, ...],
    as_json: bool,
) -> int:
    """Generate text with MODEL, holding --memory bytes of its weights.

    MODEL is a directory written by save_pretrained of transformers. Its weights are read while it
    computes; nothing is written. Tokens are printed as they come, then the times.
    """
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("either --prompt or --prompt-ids says what to go on from")
    if not temperature and (top_p is not None or seed is not None):
        raise click.UsageError("--top-p and --seed go with a --temperature above 0")
    check_directory(str(model))
    from penstock import offload

    begun = time.perf_counter()
    try:
        streamed = offload.stream(model, memory_bytes=memory_bytes, identities=identities or None)
    except ValueError as error:
        raise _plain(error) from error
    made = time.perf_counter()
    if not getattr(streamed, "can_generate", bool)():
        kind = type(streamed).__name__
        raise click.ClickException(f"{model}: a {kind} does not go on from a prompt")
    import torch
    import transformers

    # Its warnings concern settings that the user of this command cannot change.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer = None if prompt is None else _tokenizer(model)
    ids: list[int] = (prompt_ids if tokenizer is None else tokenizer(prompt)["input_ids"]) or []
    config = streamed.config.get_text_config()
    _check_ids(ids, config.vocab_size)
    if seed is not None:
        torch.manual_seed(seed)
    told = _streamer(tokenizer, is_quiet=as_json)
    how: dict[str, Any] = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_p": top_p or 1.0}
    tokens = torch.tensor([ids])
    asked = time.perf_counter()
    with _explained(config, len(ids) + max_new_tokens, lookup), torch.inference_mode():
        generated = streamed.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            prompt_lookup_num_tokens=lookup or None,
            streamer=told,
            **how,
        )[0].tolist()
    # A model with an encoder does not continue the prompt, but a start token of its own.
    made_ids = generated[1 if streamed.config.is_encoder_decoder else len(ids) :]
    seconds = time.perf_counter() - asked
    report = offload.report(streamed)
    figures = {
        "seconds": seconds,
        "stream_seconds": made - begun,
        "first_token_seconds": told.first_at - asked,
        "tokens_per_second": len(made_ids) / seconds,
    }
    if as_json:
        text = None if tokenizer is None else tokenizer.decode(made_ids, skip_special_tokens=True)
        what = {"model": str(model), "memory_bytes": memory_bytes, "prompt_ids": ids}
        print_json({**what, "ids": made_ids, "text": text, **figures, "report": _in_json(report)})
    else:
        _print(report, len(made_ids), figures)
    return 0


def _in_json(report: StreamReport) -> dict[str, Any]:
    return {
        **dataclasses.asdict(report),
        "roofline_seconds": report.roofline_seconds,
        "of_roofline": report.of_roofline,
    }


def _print(report: StreamReport, tokens: int, figures: dict[str, float]) -> None:
    out = console()
    out.print()
    out.print(
        f"tokens   {tokens}, {figures['tokens_per_second']:.2f} a second, the first after"
        f" {figures['first_token_seconds']:.2f} s; made in {figures['stream_seconds']:.1f} s"
    )
    out.print(str(report))


@contextlib.contextmanager
def _explained(config: Any, positions: int, lookup: int) -> Iterator[None]:
    """Raises `ClickException` for errors of `generate` that come from the command line."""
    try:
        yield
    except ValueError as error:
        # Models with a state, such as Mamba, cannot take guessed tokens back.
        if not lookup or isinstance(error, PenstockError):
            raise
        raise click.ClickException(f"--lookup {lookup}: {_plain(error).message}") from error
    except IndexError as error:
        # The model looks positions up in a table that is too short.
        count = getattr(config, "max_position_embeddings", None)
        if count is None or positions <= count:
            raise
        raise click.ClickException(
            f"the model has {count} positions: ask for fewer --max-new-tokens"
        ) from error


def _plain(error: Exception) -> click.ClickException:
    """A one-line error of the command for an error of a call."""
    text = " ".join(str(error).split()).replace("memory_bytes=", "--memory ")
    return click.ClickException(escaped(text))


def _tokenizer(model: Path) -> Any:
    """The tokenizer of a model; raises `ClickException` if there is none."""
    import transformers

    try:
        found = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:
        # Transformers raises many kinds of errors for missing files.
        raise click.ClickException(
            f"{model}: there is no tokenizer that transformers can load: name what to go on from"
            f" by --prompt-ids ({type(error).__name__})"
        ) from error
    return found


def _check_ids(ids: list[int], vocabulary: int) -> None:
    if not ids:
        raise click.UsageError("the prompt is empty: there is nothing to go on from")
    for one in ids:
        if one >= vocabulary:
            raise click.UsageError(
                f"--prompt-ids: the model has {vocabulary} tokens, none is {one}"
            )


def _streamer(tokenizer: Any, *, is_quiet: bool) -> Any:
    """The streamer that `generate` calls with each token."""
    from transformers.generation.streamers import BaseStreamer, TextStreamer

    class Timed:
        """Records when the first token after the prompt came."""

        first_at = 0.0
        has_prompt = False

        def note(self) -> bool:
            """Whether this call has a token; the first call has the prompt."""
            if not self.has_prompt:
                self.has_prompt = True
                return False
            self.first_at = self.first_at or time.perf_counter()
            return True

    class Text(Timed, TextStreamer):
        def put(self, value: Any) -> None:
            self.note()
            super().put(value)  # type: ignore[no-untyped-call]

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if not is_quiet:
                click.echo(escaped(text), nl=stream_end)

    class Ids(Timed, BaseStreamer):
        def put(self, value: Any) -> None:
            if self.note() and not is_quiet:
                click.echo("".join(f"{one} " for one in value.flatten().tolist()), nl=False)

        def end(self) -> None:
            if not is_quiet:
                click.echo()

    if tokenizer is None:
        return Ids()
    return Text(tokenizer, skip_prompt=True, skip_special_tokens=True)
