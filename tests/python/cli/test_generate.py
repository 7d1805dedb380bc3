"""`penstock generate`: the same tokens as the model in memory, the report, and errors."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock import cli

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["water", "flows", "down", "the", "\x1b[31mpipe", "hill"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a model without a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(WORDS),
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", "generate", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def expected(model: Path, ids: list[int], count: int) -> list[int]:
    whole = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    found = whole.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return found[0, len(ids) :].tolist()


def test_tokens_come_and_what_they_took_fits_a_terminal(run: Any, model: Path) -> None:
    arguments = (model, "--memory", "300kB", "--prompt-ids", "1, 2,3", "--max-new-tokens", 7)
    code, out, _ = run(*arguments)
    assert code == 0
    tokens, _, summary = out.partition("\n\n")
    assert list(map(int, tokens.split())) == expected(model, [1, 2, 3], 7)
    assert "tokens   7, " in summary
    assert "of the roofline" in summary
    assert max(map(len, summary.splitlines())) <= 80
    code, out, _ = run(*arguments, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["ids"] == list(map(int, tokens.split()))
    assert told["text"] is None
    assert told["report"]["pass_bytes"] > 0
    assert 0 < told["first_token_seconds"] <= told["seconds"]


def test_tokens_that_are_guessed_take_fewer_passes(run: Any, model: Path) -> None:
    given = (model, "--memory", "300kB", "--prompt-ids", "1,2,3", "--max-new-tokens", 20)
    code, out, _ = run(*given, "--lookup", 5)
    assert code == 0
    assert list(map(int, out.partition("\n\n")[0].split())) == expected(model, [1, 2, 3], 20)
    passes = {
        count: json.loads(run(*given, "--lookup", count, "--json")[1])["report"]["passes"]
        for count in (0, 5)
    }
    assert passes[0] == 20
    assert passes[5] < 20


def test_text_goes_on_and_steers_no_terminal(run: Any, model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: number for number, word in enumerate(WORDS)}, unk_token="water"
        )
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    ids = expected(tmp_path, [0, 1], 6)
    code, out, _ = run(
        tmp_path, "--memory", "300kB", "--prompt", "water flows", "--max-new-tokens", 6
    )
    assert code == 0
    assert "\x1b" not in out
    shown = out.partition("\n\n")[0].replace("\\x1b", "\x1b").split()
    assert shown == [WORDS[one] for one in ids]
    drawn = (tmp_path, "--memory", "1MB", "--prompt", "hill", "--temperature", 2, "--json")
    first, again, other = (
        json.loads(run(*drawn, "--max-new-tokens", 20, "--seed", seed)[1])["ids"]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_what_goes_wrong_is_one_line(run: Any, model: Path, tmp_path: Path) -> None:
    given = ("--memory", "1MB", "--prompt-ids", "1")
    for arguments, message in (
        ((model, "--memory", "1kB", "--prompt", "water"), "--memory 1000: .* is the least that"),
        ((model, "--memory", "1MB", "--prompt", "water"), "--prompt-ids"),
        ((tmp_path / "nothing", *given), "there is no such directory"),
        ((tmp_path, *given), "no safetensors file is there"),
    ):
        code, _, err = run(*arguments)
        assert code == 1
        (line,) = err.strip().splitlines()
        assert line.lower().startswith("error: ")
        assert re.search(message, line), line
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    code, _, err = run(tmp_path, *given)
    assert (code, "no config.json is there" in err) == (1, True)


def test_models_that_are_no_llama(run: Any, tmp_path: Path) -> None:
    """A model of encoder and decoder, one with few positions, one that generates no text."""
    common = {"vocab_size": 300, "pad_token_id": 0, "eos_token_id": None}
    t5 = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0, **common
    )
    transformers.AutoModelForSeq2SeqLM.from_config(t5).save_pretrained(tmp_path / "t5")
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=16, **common)
    transformers.AutoModelForCausalLM.from_config(gpt2).save_pretrained(tmp_path / "gpt2")
    bert = transformers.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=300,
    )  # fmt: skip
    transformers.AutoModelForMaskedLM.from_config(bert).save_pretrained(tmp_path / "bert")
    given = ("--memory", "1MB", "--prompt-ids", "1,2,3", "--max-new-tokens", 20)
    code, out, _ = run(tmp_path / "t5", *given, "--json")
    assert (code, len(json.loads(out)["ids"])) == (0, 20)
    for name, message in (("gpt2", "has 16 positions"), ("bert", "BertForMaskedLM does not go on")):
        code, _, err = run(tmp_path / name, *given)
        assert (code, message in err) == (1, True), err


def test_a_model_that_takes_no_guesses_is_said(run: Any, tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=None
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    given = (tmp_path, "--memory", "300kB", "--prompt-ids", "1,2,3", "--max-new-tokens", 4)
    code, out, _ = run(*given, "--json")
    assert (code, len(json.loads(out)["ids"])) == (0, 4)
    code, _, err = run(*given, "--lookup", 4)
    assert code == 1
    (line,) = err.strip().splitlines()
    assert re.match("Error: --lookup 4: assisted generation is not supported", line), line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "1MB"), "either --prompt or --prompt-ids"),
        (("--memory", "1MB", "--prompt", "a", "--prompt-ids", "1"), "either --prompt or"),
        (("--memory", "much", "--prompt", "a"), "'much' is not a size"),
        (("--prompt", "a"), "Missing option '--memory'"),
        (("--memory", "1MB", "--prompt-ids", "1,x"), "no list of numbers"),
        (("--memory", "1MB", "--prompt-ids", "1,600"), "none is 600"),
        (("--memory", "1MB", "--prompt-ids", "1", "--seed", "3"), "go with a --temperature"),
    ],
)
def test_command_lines_that_make_no_sense(
    run: Any, model: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(model, *arguments)
    assert code == 2
    assert message in err
