"""The shipped model `tiny`, its draft and the generators of what the offline tasks ask.

Both were trained by tools/train_tiny in the repository; `training.json` in each folder says how.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
DRAFT_DIR: Path = Path(__file__).parent / "draft"

__all__ = ["DRAFT_DIR", "MODEL_DIR"]
