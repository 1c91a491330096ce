"""The streams of `lm_eval_moecache.testing`, under the name that the tests know them by."""

from lm_eval_moecache.testing.streams import *  # noqa: F403
