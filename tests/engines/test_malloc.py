"""Freed memory: kept where the C library lets itself be told, and nowhere else."""

import os
import platform
import resource
from types import SimpleNamespace

import pytest
import torch

from pfl_lightning.engines import malloc


@pytest.fixture
def told(monkeypatch):
    calls = []
    library = SimpleNamespace(mallopt=lambda *settings: calls.append(settings))
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: library)
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    return calls


def test_elsewhere_nothing_is_told(told, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    malloc.keep_freed()
    assert told == []


def test_nor_where_the_user_has_told_it(told, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    malloc.keep_freed()
    assert len(told) == 2
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    malloc.keep_freed()
    assert len(told) == 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives memory back by rules of its own")
def test_pages_stay():
    malloc.keep_freed()

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            # more at once than twice the largest, which the library would keep by itself
            [torch.ones(3 * 2**20) for _ in range(3)]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert faults() < 3072
