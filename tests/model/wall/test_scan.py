"""`scoring=scan` on the wall clock: each token's bytes in its turn, the virtual clock's answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lm_eval_moecache.engine.wall.worker import TransferError
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.wrap import WrappedModel
from tests.model.wall.models import BrokenPools, LatePools, counts, wrap_wall
from tests.models import FAMILY_CASES, random_model
from tests.test_equality import wrap_virtual

CASES: list[dict[str, str]] = [
    {},
    {"miss": "drop", "miss.h": "1"},
    {"miss": "substitute_random"},
    {"routing": "cache_prior"},
]


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 300, (1, n), generator=generator) for n in (1, 7, 19)]


def scanned(wrapped: WrappedModel) -> list[torch.Tensor]:
    found = []
    for text in texts():
        wrapped.scan_scoring = True
        with torch.no_grad():
            found.append(wrapped.model(text, use_cache=False).logits)
        wrapped.engine.check_integrity()
    return found


def told(model: Any, capacity: str, changes: dict[str, str]) -> tuple[list[torch.Tensor], Any]:
    wrapped = wrap_virtual(model, "on_demand", capacity, **changes)
    found = scanned(wrapped)
    wrapped.unwrap()
    return found, counts(wrapped.engine.ledger.passes)


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_scanned_texts_are_answered_and_counted_as_under_the_virtual_clock(family: str) -> None:
    """Twenty delayed repetitions of each family, lossless and lossy, also with waves."""
    model = random_model(family)
    # At one expert a layer a token's experts come in waves.
    for capacity, changes in zip(("2/layer", "1/layer", "5/layer", "3/layer"), CASES, strict=True):
        expected, counted = told(model, capacity, changes)
        for seed in range(5):
            options = {"changes": changes, "seed": seed, "longest_s": 0.0001}
            wrapped = wrap_wall(model, "on_demand", capacity, LatePools, **options)
            found = scanned(wrapped)
            wrapped.unwrap()
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), seed
            assert counts(wrapped.engine.ledger.passes) == counted


def test_a_tokens_time_is_its_own_transfers_and_its_share_of_the_rest() -> None:
    model = random_model("olmoe")
    # 3 kB an expert: at 1 MB/s a missed expert takes 3 ms, and the model itself next to nothing.
    wrapped = wrap_wall(model, "on_demand", "2/layer", throttle_bytes_per_s=1e6)
    scanned(wrapped)
    passes = wrapped.engine.ledger.passes
    size = wrapped.engine.geometry.expert_bytes[0][0]
    for record in passes:
        # The link is busy from when its thread has woken up, which a loaded machine lets wait.
        assert 0 < record.link_busy_s <= record.duration_s
        assert record.stall_s <= record.duration_s
        assert record.duration_s >= record.misses * size / 1e6 * 0.99
    text = passes[-19:]
    whole = sum(record.duration_s for record in text)
    assert whole < wrapped.engine.clock.now - text[0].start_s
    wrapped.unwrap()


def test_a_scan_that_breaks_off_does_not_harm_the_next() -> None:
    """The caches have decided for the whole text: what did not move yet moves before the next."""
    model = random_model("olmoe")
    expected, _ = told(model, "2/layer", {})
    wrapped = wrap_wall(model, "on_demand", "2/layer", LatePools, longest_s=0.0002)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for place in range(2):
        experts = find_moe_layers(model)[place].experts
        handle = experts.register_forward_pre_hook(interrupt)
        wrapped.scan_scoring = True
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(texts()[2], use_cache=False)
        handle.remove()
        found = scanned(wrapped)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    wrapped.unwrap()


def test_a_failing_copy_ends_the_scan_with_an_error() -> None:
    wrapped = wrap_wall(
        random_model("olmoe"), "on_demand", "2/layer", BrokenPools, error=OSError("gone"), at=9
    )
    with pytest.raises(TransferError, match="gone"):
        scanned(wrapped)
    wrapped.unwrap()
