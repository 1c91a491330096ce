"""Speculative decoding behind the expert cache: the harness model `moecache-spec`."""
