"""The shipped model `tiny`, its draft, and what the offline tasks ask.

All were made by tools/train_tiny in the repository; `training.json` in each folder says how.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
DRAFT_DIR: Path = Path(__file__).parent / "draft"
