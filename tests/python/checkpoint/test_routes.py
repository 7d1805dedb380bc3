"""Every way to restore a state, and every mismatch: refused by name, or restored rightly.

The table has a row for each route and a column for each check. A cell is ``=`` if the target
afterwards equals the checkpoint bit for bit; ``x`` if the route raises an error that names the
tensor. The other words describe a framework's semantics, which Penstock does not change:

* ``cast``: PyTorch's and JAX's own loading converts to the type of the target;
* ``kept``: tensors that only one side has are left alone, as the route says.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import penstock
from penstock.plugin import SealingKeys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

torch.set_num_threads(1)

CHECKS = ("same", "missing", "unexpected", "shape", "dtype", "untied", "tied")
TABLE = """
route         same  missing  unexpected  shape  dtype  untied  tied
into          =     x        x           x      x      x       =
training      =     x        x           x      x      x       =
resume        =     x        x           x      x      x       =
partial       =     kept     x           x      x      x       =
accelerate    =     x        x           x      x      x       =
transformers  =     x        x           x      x      x       =
ray           =     x        x           x      x      x       =
lightning     =     x        x           x      cast   x       =
dcp           =     x        kept        x      cast   x       =
torchtitan    =     x        x           x      x      x       =
deepspeed     =     x        x           x      cast   x       =
jax           =     x        x           x      x      =       =
stream        =     x        kept        x      cast   x       =
load          =     =        =           =      =      =       =
convert       =     =        =           =      =      =       =
import        =     =        =           =      =      =       =
features      =     x        kept        x      x      =       =
"""
SLOW = {"deepspeed": pytest.mark.slow}
"""Routes whose framework takes longer to import than all others."""
ROWS = [line.split() for line in TABLE.strip().splitlines()]
CELLS = [
    pytest.param(route, check, cell, id=f"{route}-{check}", marks=SLOW.get(route, ()))
    for route, *cells in ROWS[1:]
    for check, cell in zip(CHECKS, cells, strict=True)
]


class Speaker(nn.Module):
    """An embedding and a head, with the one property that a check varies."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(5 if kind == "shape" else 4, 3)
        self.head = nn.Linear(3, 5 if kind == "shape" else 4, bias=kind == "unexpected")
        if kind != "missing":
            self.scale = nn.Parameter(torch.randn(3))
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "dtype":
            self.double()

    def forward(self, x: Any) -> Any:
        return self.head(self.embed(x) * self.scale)


def save(model: Speaker, where: Path) -> Path:
    penstock.save(where / "ckpt", penstock.Training(rng=False, model=model))
    return where / "ckpt"


# Each route restores a model from a checkpoint of another one.


def into(saved: Speaker, model: Speaker, where: Path) -> None:
    penstock.load(save(saved, where), into={"model": model.state_dict()})


def training(saved: Speaker, model: Speaker, where: Path) -> None:
    penstock.load(save(saved, where), into=penstock.Training(rng=False, model=model))


def resume(saved: Speaker, model: Speaker, where: Path) -> None:
    store = penstock.CheckpointStore(where)
    store.save(1, penstock.Training(rng=False, model=saved))
    assert store.resume(penstock.Training(rng=False, model=model)) == 1


def partial(saved: Speaker, model: Speaker, where: Path) -> None:
    one = penstock.Training(rng=False, model=model)
    penstock.load(save(saved, where), into=one, keys="model.*")


def by_accelerate(saved: Speaker, model: Speaker, where: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    from penstock.integrations.accelerate import attach

    for one in (saved, model):
        accelerator = accelerate.Accelerator(cpu=True)
        attach(accelerator)
        accelerator.prepare(one)
        if one is saved:
            accelerator.save_state(str(where / "ckpt"))
        else:
            accelerator.load_state(str(where / "ckpt"))
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def by_transformers(saved: Speaker, model: Speaker, where: Path) -> None:
    pytest.importorskip("transformers")
    from penstock.integrations.transformers import parts
    from penstock.integrations.transformers.settings import Settings

    parts.restore_weights(str(save(saved, where)), model, Settings())


def by_ray(saved: Speaker, model: Speaker, where: Path) -> None:
    pytest.importorskip("ray")
    from penstock.integrations.ray import resuming

    class Alone:
        rank = 0

        @staticmethod
        def everyone(told: Any) -> list[Any]:
            return [told]

    one = penstock.Training(rng=False, model=model)
    resuming._load(Alone(), str(save(saved, where)), one, SealingKeys())


def by_lightning(saved: Speaker, model: Speaker, where: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from penstock.integrations.lightning import PenstockIO

    class Module(lightning.LightningModule):
        def __init__(self, speaker: Speaker) -> None:
            super().__init__()
            self.speaker = speaker

        def validation_step(self, batch: Any) -> None:
            self.speaker(batch)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(1, dtype=torch.long))

    state = {
        "state_dict": Module(saved).state_dict(),
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
    }
    io = PenstockIO()
    io.save_checkpoint(state, where / "ckpt")
    io.wait()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", limit_val_batches=0, plugins=[PenstockIO()], **quiet
    )
    trainer.validate(Module(model), ckpt_path=str(where / "ckpt"), verbose=False)


def by_dcp(saved: Speaker, model: Speaker, where: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from penstock.integrations.dcp import StorageReader, StorageWriter

    dcp.save({"model": saved.state_dict()}, storage_writer=StorageWriter(where / "ckpt"))
    dcp.load({"model": model.state_dict()}, storage_reader=StorageReader(where / "ckpt"))


def by_torchtitan(saved: Speaker, model: Speaker, where: Path) -> None:
    checkpointer = pytest.importorskip("torchtitan.components.checkpointer")
    from penstock.integrations.torchtitan.states import States

    def run(one: Speaker) -> Any:
        parts = {checkpointer.MODEL: checkpointer.ModelWrapper(one), "train_state": {"step": 1}}
        return States(parts, known={"train_state"}, is_trusted=False, keys=SealingKeys())

    penstock.save(where / "ckpt", run(saved))
    penstock.load(where / "ckpt", into=run(model))


def by_deepspeed(saved: Speaker, model: Speaker, where: Path) -> None:
    from integrations.deepspeeds import attach, config_of, deepspeed_here

    deepspeed = deepspeed_here()
    for one in (saved, model):
        engine, *_ = deepspeed.initialize(
            model=one, model_parameters=one.parameters(), config=config_of(0, "fp32")
        )
        attach(engine)
        try:
            if one is saved:
                engine.save_checkpoint(str(where / "run"))
            else:
                # Its optimizer numbers parameters itself.
                engine.load_checkpoint(str(where / "run"), load_module_only=True)
        finally:
            engine.destroy()


def by_jax(saved: Speaker, model: Speaker, where: Path) -> None:
    jax = pytest.importorskip("jax")
    from penstock.integrations import jax as pj

    def tree(one: Speaker) -> dict[str, Any]:
        return {name: value.numpy() for name, value in one.state_dict().items()}

    pj.save(where / "ckpt", tree(saved))
    like = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), tree(model))
    with jax.enable_x64(True):
        found = pj.load(where / "ckpt", like=like)
    # Arrays of JAX are never filled in place: the program uses the returned ones.
    given = {name: torch.tensor(value.__array__()) for name, value in found.items()}
    assert_equal(given, saved.state_dict(), list(given))


def by_stream(saved: Speaker, model: Speaker, where: Path) -> None:
    from penstock import offload

    path = save(saved, where)
    streamed = offload.stream(
        model, weights=path, key="model", blocks=["head"], memory_bytes=1 << 20
    )
    with torch.inference_mode():
        found = streamed(torch.arange(4))
    reference = Speaker("same").to(found.dtype)
    own = {name: saved.state_dict()[name] for name in reference.state_dict()}
    reference.load_state_dict(own)
    assert torch.equal(found, reference(torch.arange(4)))


FILLED: dict[str, Callable[[Speaker, Speaker, Path], None]] = {
    "into": into,
    "training": training,
    "resume": resume,
    "partial": partial,
    "accelerate": by_accelerate,
    "transformers": by_transformers,
    "ray": by_ray,
    "lightning": by_lightning,
    "dcp": by_dcp,
    "torchtitan": by_torchtitan,
    "deepspeed": by_deepspeed,
    "jax": by_jax,
    "stream": by_stream,
}


# These routes return the checkpoint's values; the program decides how to use them.


def by_load(saved: Speaker, where: Path) -> dict[str, Any]:
    found: dict[str, Any] = penstock.load(save(saved, where))["model"]
    return found


def by_convert(saved: Speaker, where: Path) -> dict[str, Any]:
    torch.save(saved.state_dict(), where / "saved.pt")
    penstock.convert(where / "saved.pt", where / "ckpt")
    found: dict[str, Any] = penstock.load(where / "ckpt")
    return found


def by_import(saved: Speaker, where: Path) -> dict[str, Any]:
    safetensors = pytest.importorskip("safetensors.torch")
    (where / "model").mkdir()
    state = {name: value.clone() for name, value in saved.state_dict().items()}
    safetensors.save_file(state, where / "model" / "model.safetensors")
    penstock.import_model(where / "model", where / "ckpt")
    found: dict[str, Any] = penstock.load(where / "ckpt")["model"]
    return found


GIVEN = {"load": by_load, "convert": by_convert, "import": by_import}


# These routes check the returned values themselves.


def by_features(saved: Speaker, model: Speaker, where: Path) -> None:
    from penstock import features

    path = save(saved, where)
    for name, value in model.state_dict().items():
        if value.dim() == 2:
            dtype = str(value.dtype).removeprefix("torch.")
            key = f"model.{name}"
            with features.open(path, key=key, shape=value.shape, dtype=dtype) as table:
                rows = torch.from_numpy(table.gather([1, 0]).copy())
            assert torch.equal(rows, saved.state_dict()[name][[1, 0]])
    if "scale" not in saved.state_dict():
        features.open(path, key="model.scale")


def restore(route: str, check: str, where: Path) -> None:
    """Runs one cell: restores a model, and compares it with the saved one."""
    torch.manual_seed(1)
    saved = Speaker("same" if check in ("same", "untied") else check)
    model = Speaker("tied" if check == "untied" else "same")
    before = copy.deepcopy(saved.state_dict())
    if route in GIVEN:
        assert_equal(GIVEN[route](saved, where), before, list(before))
        return
    fill = by_features if route == "features" else FILLED[route]
    fill(saved, model, where)
    if route not in ("stream", "features", "jax"):
        assert_equal(model.state_dict(), before, [name for name in before if "bias" not in name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("route", "check", "cell"), CELLS)
def test_a_state_is_restored_or_refused_by_name(
    tmp_path: Path, request: pytest.FixtureRequest, route: str, check: str, cell: str
) -> None:
    run: Callable[..., Any] = restore
    if route == "deepspeed":
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed")
        # It changes the whole process, so each process runs it for all cells.
        run = functools.partial(request.getfixturevalue("jobs").of(1).call, restore)
    if cell != "x":
        run(route, check, tmp_path)
        return
    kinds = (penstock.PenstockError, RuntimeError, ValueError, CheckpointException)
    with pytest.raises(kinds, match=r"embed|head|scale"):
        run(route, check, tmp_path)


def assert_equal(found: Any, saved: Any, names: list[str]) -> None:
    for name in names:
        # If the target has another type, its values are rounded to the target's.
        assert torch.equal(found[name], saved[name].to(found[name].dtype)), name
