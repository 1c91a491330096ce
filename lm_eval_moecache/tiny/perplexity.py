"""The counts that turn a page's log-likelihood into wikitext's three metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def process_results(
    doc: Mapping[str, str], results: Sequence[float]
) -> dict[str, tuple[float, int]]:
    """(log-likelihood, count) per metric: words between white space, and UTF-8 bytes."""
    (loglikelihood,) = results
    words = len(re.split(r"\s+", doc["page"]))
    size = len(doc["page"].encode("utf-8"))
    return {
        "word_perplexity": (loglikelihood, words),
        "byte_perplexity": (loglikelihood, size),
        "bits_per_byte": (loglikelihood, size),
    }
