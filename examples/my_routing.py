"""A routing rule of one's own: a token's lightest expert is left out unless it is in the cache.

Run it from this folder: `moecache replay TRACE --routing my_routing.SpareLightest`.
"""

from lm_eval_moecache import Event, Routing, Selection


class SpareLightest(Routing):
    """Leaves out a token's lightest expert if it is absent; the others share its weight."""

    source = "the worked example of docs/algorithms.md"

    def choose(self, event: Event) -> Selection | None:
        keep = event.is_resident  # [tokens, top_k], heaviest first
        keep[:, :-1] = True
        return None if keep.all() else Selection(event.experts, keep, renormalize=True)
