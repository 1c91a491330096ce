"""Which resident expert leaves: a file holds a family of rules; the folder is the registry."""
