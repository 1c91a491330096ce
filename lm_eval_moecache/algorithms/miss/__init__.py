"""What happens to an absent expert: a file holds a family of rules; the folder is the registry."""
