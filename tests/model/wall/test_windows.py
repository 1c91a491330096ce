"""What only Unix has is left out elsewhere, and nothing else."""

from __future__ import annotations

import importlib
import sys

import pytest

from lm_eval_moecache.model.wall import memory


def test_without_the_resource_module_memory_is_imported_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    try:
        importlib.reload(memory)
        assert memory.resource is None
        importlib.reload(importlib.import_module("lm_eval_moecache.sweep.files"))
    finally:
        monkeypatch.undo()
        importlib.reload(memory)
    assert memory.resource is not None
