"""Offline artifacts: one module per `moecache profile` action, found by listing this folder."""
