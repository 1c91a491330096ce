"""Which experts a token gets: a file holds a family of rules; the folder is the registry."""
