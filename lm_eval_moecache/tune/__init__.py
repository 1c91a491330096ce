"""Searches compositions and their parameters for speed under a budget of accuracy."""
