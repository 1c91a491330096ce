"""The rules a policy is composed of: one folder per axis, one file per family of rules."""
