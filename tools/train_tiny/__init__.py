"""Trains the shipped model `tiny` and its draft; stands outside the wheel."""
