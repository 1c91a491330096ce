"""What is loaded ahead of need: a file holds a family of rules; the folder is the registry."""
