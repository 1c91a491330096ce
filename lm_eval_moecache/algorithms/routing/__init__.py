"""Routing algorithms: which experts a token gets. One file each; the folder is the registry."""
