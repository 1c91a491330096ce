"""Runs read back from their files, and what is said of each."""
