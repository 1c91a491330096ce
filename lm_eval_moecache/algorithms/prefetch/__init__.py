"""Prefetch algorithms: what to load before it is asked for. The folder is the registry."""
