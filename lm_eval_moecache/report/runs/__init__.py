"""Runs read back from their files, and what is told of each."""
