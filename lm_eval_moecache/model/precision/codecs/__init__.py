"""Codecs, one file each, named as users type them. The folder is the registry."""
