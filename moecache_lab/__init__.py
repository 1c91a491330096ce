"""The laboratory: the papers' analyses, their tables and figures, and refits of constants.

It imports the evaluator, `lm_eval_moecache`, and for refits the forecaster, `moecache_plan`; they
import nothing of it. Its commands register by entry points of `lm_eval_moecache.commands`.
"""
