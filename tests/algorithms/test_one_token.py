"""What is worked out in Python for one token is what numpy gives for many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.routing import cache_prior
from lm_eval_moecache.algorithms.routing.cache_prior import CachePrior
from lm_eval_moecache.testing.streams import make_event, make_geometry

# Few values, so that there are ties.
LOGITS = st.lists(
    st.one_of(st.sampled_from([-1.5, 0.0, 0.25, 2.0]), st.floats(-20, 20, width=16)),
    min_size=10,
    max_size=10,
)


@given(
    st.lists(LOGITS, min_size=1, max_size=5),
    st.sets(st.integers(0, 9)),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.integers(0, 2),
    st.booleans(),
)
def test_cache_prior_chooses_for_one_token_as_for_many(
    texts: list[list[float]], cached: set[int], lambda_: float, top_j: int, is_unusual: bool
) -> None:
    geometry = make_geometry(num_layers=2, num_experts=10, top_k=3)
    quick, slow = (CachePrior(geometry, lambda_=lambda_, top_j=top_j) for _ in range(2))
    resident = {geometry.key(1, expert) for expert in cached}
    for step, logits in enumerate(texts):
        event = make_event(geometry, step, 1, [logits])
        if is_unusual:
            # A router that chose by more than its logits.
            event = event._replace(experts=np.array([[7, 1, 4]]), keys=[17, 11, 14])
        found = quick.select(event, resident)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_prior, "is_by_logits", lambda *_: False)
            expected = slow.select(event, resident)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.experts.tolist() == expected.experts.tolist()
            assert found.experts.dtype == expected.experts.dtype
