"""Eviction algorithms: which resident expert leaves. One file each; the folder is the registry."""
