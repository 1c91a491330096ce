"""Models that the tests of speculative decoding share, each loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
from tests.model.speculative.drafts import untrained_draft


@pytest.fixture(scope="session")
def useless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_draft(tmp_path_factory.mktemp("drafts") / "useless")


@pytest.fixture(scope="session")
def plain() -> MoECacheLM:
    return MoECacheLM(pretrained="tiny", device="cpu", dtype="float32", policy="on_demand")


@pytest.fixture(scope="session")
def spec() -> MoECacheSpecLM:
    return MoECacheSpecLM(
        pretrained="tiny", device="cpu", dtype="float32", policy="sp_moe", draft="tiny"
    )
