"""PyTorch is optional, and importing the package is light."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import penstock
from conftest import run_child

# A fork would have the server's imports, which these tests check.
run_fresh = functools.partial(run_child, is_fresh=True)

WITHOUT_TORCH = """
    import json, sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ModuleNotFoundError(f"No module named {name!r}", name="torch")

    sys.meta_path.insert(0, Blocker())
    import numpy as np, penstock
    path = sys.argv[1]
"""


def test_importing_the_package_imports_nothing_heavy():
    loaded = run_fresh(
        """
        import json, sys
        import penstock
        heavy = {"torch", "rich", "click", "transformers", "safetensors", "ml_dtypes", "asyncio"}
        print(json.dumps(sorted(heavy & set(sys.modules))))
        """
    )
    assert loaded == []


def test_saving_and_loading_arrays_imports_no_torch(tmp_path):
    assert run_fresh(
        """
        import json, sys
        import numpy as np, penstock
        penstock.save(sys.argv[1], {"w": np.ones(3), "x": [1, {2: b"y"}]})
        penstock.load(sys.argv[1])
        penstock.verify(sys.argv[1])
        penstock.inspect(sys.argv[1])
        store = penstock.CheckpointStore(sys.argv[1] + "-store")
        store.save(1, {"w": np.ones(3)})
        store.load()
        print(json.dumps(["torch" not in sys.modules, "rich" not in sys.modules]))
        """,
        tmp_path / "ckpt",
    ) == [True, True]


def test_arrays_and_plain_values_work_without_torch(tmp_path):
    script = (
        WITHOUT_TORCH
        + """
    state = {"w": np.arange(12.0).reshape(3, 4), "b": np.array(["x"]), "n": [None, 2**70, (1,)]}
    state["view"] = state["w"].T
    penstock.save(path, state)
    loaded = penstock.load(path)
    target = {**loaded, "w": np.zeros((3, 4))}
    target["view"] = target["w"].T
    filled = penstock.load(path, into=target)
    print(json.dumps([
        bool((loaded["w"] == state["w"]).all() and (loaded["view"] == state["view"]).all()),
        loaded["b"].tolist(), loaded["n"][1] == 2**70,
        np.shares_memory(loaded["w"], loaded["view"]),
        bool((filled["w"] == state["w"]).all()), penstock.verify(path).ok,
    ]))
    """
    )
    assert run_fresh(script, tmp_path / "ckpt") == [True, ["x"], True, True, True, True]


def test_tensors_come_back_as_arrays_without_torch(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    penstock.save(tmp_path / "ckpt", {"t": base, "v": base.t(), "i": torch.tensor(3)})
    script = (
        WITHOUT_TORCH
        + """
    loaded = penstock.load(path)
    print(json.dumps([
        [type(value).__name__ for value in loaded.values()],
        loaded["v"].tolist(), loaded["i"].item(), np.shares_memory(loaded["t"], loaded["v"]),
    ]))
    """
    )
    assert run_fresh(script, tmp_path / "ckpt") == [
        ["ndarray"] * 3,
        base.t().tolist(),
        3,
        True,
    ]


MISSING = (
    WITHOUT_TORCH
    + """
    try:
        penstock.load(path)
        print(json.dumps(None))
    except penstock.errors.MissingDependencyError as error:
        print(json.dumps([error.name, str(error), isinstance(error, ImportError)]))
"""
)


def assert_names_torch(result):
    assert result is not None
    name, message, is_import_error = result
    assert name == "torch"
    assert "pip install 'penstock[torch]'" in message
    assert is_import_error


@pytest.mark.filterwarnings("ignore:.*experimental")
def test_a_type_that_numpy_lacks_is_the_named_error_without_torch(tmp_path):
    penstock.save(tmp_path / "ckpt", {"t": torch.zeros(3, dtype=torch.complex32)})
    assert_names_torch(run_fresh(MISSING, tmp_path / "ckpt"))


def test_bfloat16_is_an_array_of_ml_dtypes_or_the_named_error_without_torch(tmp_path):
    penstock.save(tmp_path / "ckpt", {"t": torch.zeros(3, dtype=torch.bfloat16)})
    result = run_fresh(MISSING, tmp_path / "ckpt")
    if result is not None:
        name, message, _ = result
        assert name in ("torch", "ml_dtypes")
        assert "pip install" in message


def test_values_of_torch_are_the_named_error_without_torch(tmp_path):
    for number, value in enumerate((torch.Size([1]), torch.float32, torch.device("cpu"))):
        path = tmp_path / f"ckpt{number}"
        penstock.save(path, {"v": value})
        assert_names_torch(run_fresh(MISSING, path))


def test_the_rest_of_such_a_state_can_be_selected_without_torch(tmp_path):
    state = {"w": np.ones(3), "dtype": torch.bfloat16, "t": torch.zeros(2, dtype=torch.complex32)}
    penstock.save(tmp_path / "ckpt", state)
    script = (
        WITHOUT_TORCH
        + """
    print(json.dumps([list(penstock.load(path, keys="w")), penstock.verify(path).ok,
                      [tensor.dtype for tensor in penstock.inspect(path).tensors]]))
    """
    )
    assert run_fresh(script, tmp_path / "ckpt") == [["w"], True, ["float64", "complex32"]]


def test_a_device_without_torch_is_the_named_error(tmp_path):
    penstock.save(tmp_path / "ckpt", {"w": np.ones(3)})
    script = MISSING.replace("penstock.load(path)", 'penstock.load(path, device="cuda")')
    assert_names_torch(run_fresh(script, tmp_path / "ckpt"))
