"""The weights a model family gives to a chosen set of experts: one file of `rules/` for each."""
