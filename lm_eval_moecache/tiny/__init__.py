"""The shipped model `tiny`: its folder here, its data generator and its training beside it."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"

__all__ = ["MODEL_DIR"]
