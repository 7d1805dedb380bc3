"""Findings of the doctor about sealed checkpoints."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from penstock.doctor import secrets


def with_files(monkeypatch, **texts):
    monkeypatch.setattr(secrets, "read", lambda path: texts.get(path.rsplit("/", 1)[-1]))


@pytest.mark.parametrize(
    ("text", "status", "found"),
    [
        ("flags : fpu aes pclmulqdq", "ok", "of the processor"),
        ("flags : aes pclmulqdq vaes vpclmulqdq", "ok", "several blocks at once"),
        ("Features : fp asimd aes pmull", "ok", "of the processor"),
        ("Features : fp asimd", "warn", "none"),
        ("flags : fpu aes", "warn", "none"),
        ("", "ok", "not known"),
    ],
)
def test_instructions(monkeypatch, text, status, found):
    with_files(monkeypatch, cpuinfo=text)
    finding = secrets._aes()
    assert finding.status == status
    assert found in finding.found


@pytest.mark.parametrize(
    ("number", "told"), [(errno.EAGAIN, "no entropy"), (errno.EPERM, "getrandom is refused")]
)
def test_a_kernel_without_random_numbers(monkeypatch, number, told):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(secrets.os, "getrandom", refuse)
    finding = secrets._entropy()
    assert finding.status == "warn"
    assert told in finding.found
    assert finding.remedy


HEAD = "Filename Type Size Used Priority\n"


@pytest.mark.parametrize(
    ("swaps", "found", "has_reason"),
    [
        (HEAD, "none", False),
        (HEAD + "/dev/zram0 partition 1 0 5", "in memory only", False),
        (HEAD + "/dev/zram0 partition 1 0 5\n/dev/sda2 partition 1 0 5", "/dev/sda2", True),
    ],
)
def test_swap(monkeypatch, swaps, found, has_reason):
    with_files(monkeypatch, swaps=swaps)
    finding = secrets._swap()
    assert (finding.status, finding.found, bool(finding.why)) == ("ok", found, has_reason)


@pytest.mark.parametrize(
    ("pattern", "limit", "found"),
    [
        ("core", 0, "off"),
        ("core", resource.RLIM_INFINITY, "written to files"),
        ("|/usr/lib/collect %p %u", 0, "taken by /usr/lib/collect"),
    ],
)
def test_core_dumps(monkeypatch, pattern, limit, found):
    with_files(monkeypatch, core_pattern=pattern)
    monkeypatch.setattr(secrets.resource, "getrlimit", lambda _: (limit, limit))
    finding = secrets._core_dumps()
    assert (finding.status, finding.found) == ("ok", found)


def test_this_machine_is_checked():
    checks = [finding.check for finding in secrets.check()]
    assert checks == ["AES instructions", "random numbers", "swap", "core dumps"]
