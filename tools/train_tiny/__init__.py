"""Trains the shipped model `tiny` and its draft; not part of the wheel."""
