"""The forecaster: how fast a program runs a model on a machine, and what to run there.

It imports the evaluator, `lm_eval_moecache`, which imports nothing of it. Its commands register as
those of any other package do, by entry points of the group `lm_eval_moecache.commands`.
"""
