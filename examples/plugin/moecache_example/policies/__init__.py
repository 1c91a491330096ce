"""Compositions, one YAML each."""
