"""Runs mixture-of-experts models inside an emulated expert cache, for lm-evaluation-harness."""

from lm_eval_moecache import _moved

_moved.install()
