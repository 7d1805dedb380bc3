"""Versions of frameworks: older is refused, newer warns, moved names are reported."""

import errno
import sys
import types
import warnings
from importlib.metadata import version

import pytest

from penstock.errors import MissingDependencyError, StorageError
from penstock.integrations import versions
from penstock.integrations.versions import NewerVersionWarning, Probe, check_version, self_check


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    for name, value in (
        ("_tried", {}),
        ("_modules", {}),
        ("_warned", set()),
        ("_self_checked", set()),
    ):
        monkeypatch.setattr(versions, name, value)


def is_installed(monkeypatch, found):
    monkeypatch.setattr(versions, "version", lambda name: found)


@pytest.mark.parametrize(
    ("found", "first", "last"),
    [
        ("2.6.0", "2.6", "2.6"),
        ("2.6.9.post1+cpu", "2.6", "2.6"),
        ("2.10.1", "2.6", "2.11"),
        ("2.11.3", "2.6", "2.11.3"),
    ],
)
def test_a_version_that_was_tried_is_taken_without_a_word(monkeypatch, found, first, last):
    is_installed(monkeypatch, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("lightning", first, last)


@pytest.mark.parametrize(
    ("found", "last"),
    [("2.7.0", "2.6"), ("3.0.0rc1", "2.11"), ("2.12", "2.11.3"), ("2.11.4", "2.11.3")],
)
def test_a_newer_version_is_taken_with_one_warning(monkeypatch, found, last):
    is_installed(monkeypatch, found)
    with pytest.warns(NewerVersionWarning, match=rf"tried with .* {last}, and {found} is newer"):
        check_version("lightning", "2.6", last)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("lightning", "2.6", last)


def test_a_checkout_that_is_not_installed_has_the_version_of_its_module(monkeypatch):
    package, module = "penstock-no-such-package", "penstock_no_such_module"
    with pytest.raises(MissingDependencyError, match="needs it: pip install"):
        check_version(package, "1.2", "1.3", module=module)
    found = types.ModuleType(module)
    found.__version__ = "1.4.0"
    monkeypatch.setitem(sys.modules, module, found)
    with pytest.warns(NewerVersionWarning, match=r"1\.4\.0 is newer"):
        check_version(package, "1.2", "1.3", module=module)
    found.__version__ = "1.1"
    with pytest.raises(MissingDependencyError, match=r"1\.1 is installed"):
        check_version(package, "1.2", "1.3", module=module)


def test_an_older_version_is_refused_with_what_to_install(monkeypatch):
    is_installed(monkeypatch, "2.5.9")
    message = r"from 2\.6 on, and 2\.5\.9 is installed: pip install 'lightning>=2\.6'"
    with pytest.raises(MissingDependencyError, match=message) as caught:
        check_version("lightning", "2.6", "2.6")
    assert caught.value.name == "lightning"


def test_what_is_missing_is_named_with_what_installs_it():
    with pytest.raises(MissingDependencyError, match=r"pip install .no-such>=1\.2"):
        check_version("no-such", "1.2", "1.3")
    check_version("numpy", "1.0", version("numpy"))


class Trainer:
    """A framework's class, whose methods a plug-in replaces."""

    def save(self, model, trial=None):
        self.stage()
        with open(model) as file:
            self.write(file)
        return [self.after(name) for name in self.names]

    def stage(self): ...


def test_what_is_as_the_plug_in_knows_it_passes():
    probe = Probe("numpy", "the plug-in")
    save = probe.attribute(Trainer, "save")
    probe.signature(save, "model", "trial")
    probe.calls(save, "stage", "open", "write", "after")
    probe.signature(probe.attribute("json", "dumps"), "obj", "indent")
    probe.check()


def test_all_that_moved_is_named_in_one_error():
    probe = Probe("numpy", "the plug-in")
    save = probe.attribute(Trainer, "save")
    probe.signature(save, "model", "step")
    probe.signature(save, "trial")
    probe.calls(save, "write", "stage")
    probe.calls(save, "publish")
    assert probe.attribute(Trainer, "load") is None
    assert probe.attribute("json.no_such", "dumps") is None
    gone = probe.attribute(types, "NoSuch")
    probe.signature(gone, "self")
    probe.calls(probe.attribute(gone, "deeper"), "stage")
    with pytest.raises(MissingDependencyError) as caught:
        probe.check()
    message = str(caught.value)
    for moved in (
        "Trainer.save takes no step;",
        "Trainer.save demands model;",
        "Trainer.save does not use in this order: write, stage;",
        "Trainer.save uses no publish;",
        "Trainer.load;",
        "no module json.no_such;",
        "no types.NoSuch:",
        f"does not fit numpy {version('numpy')}",
        "newer Penstock",
    ):
        assert moved in message
    assert message.count("NoSuch") == 1


def test_a_newer_framework_is_tried_once_before_the_first_save(monkeypatch):
    trials = []
    is_installed(monkeypatch, "2.7.0")
    with pytest.warns(NewerVersionWarning):
        check_version("lightning", "2.6", "2.6")

    def trial():
        trials.append(len(trials))
        # A trial saves like the first save, which starts a trial.
        self_check("lightning", trial)

    self_check("lightning", trial)
    self_check("lightning", trial)
    assert trials == [0]


def test_a_framework_that_was_tried_needs_no_trial(monkeypatch):
    is_installed(monkeypatch, "2.6.7")
    check_version("lightning", "2.6", "2.6")
    self_check("lightning", lambda: pytest.fail("tried without need"))


def test_a_trial_that_fails_names_the_version_and_the_remedy(monkeypatch):
    def trial():
        raise KeyError("optimizer")

    is_installed(monkeypatch, "2.7.0")
    with pytest.warns(NewerVersionWarning):
        check_version("lightning", "2.4", "2.6")
    for _ in range(2):
        with pytest.raises(MissingDependencyError) as caught:
            self_check("lightning", trial)
        assert "2.7.0 is newer" in str(caught.value)
        assert "'optimizer': install lightning 2.4 to 2.6, or a newer" in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/run/state"),
        StorageError("/run/state: no space", path="/run/state", errno=errno.ENOSPC),
    ],
)
def test_a_trial_that_the_disk_fails_is_an_error_of_the_disk(monkeypatch, error):
    def trial():
        raise error

    is_installed(monkeypatch, "2.7.0")
    with pytest.warns(NewerVersionWarning):
        check_version("lightning", "2.4", "2.6")
    with pytest.raises(StorageError, match="/run/state") as caught:
        self_check("lightning", trial)
    assert (caught.value.path, caught.value.errno) == ("/run/state", errno.ENOSPC)
