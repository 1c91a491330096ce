"""Weighting rules: each file defines one, and the folder is their list."""
