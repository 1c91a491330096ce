"""Formats of routing traces, one file each: the folder is the registry, and nothing lists them."""
