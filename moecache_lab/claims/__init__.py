"""Tests papers' claims on the files of runs: figures, intervals, tests, verdicts, a page."""
