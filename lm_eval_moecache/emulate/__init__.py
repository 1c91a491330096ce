"""Sizes of real models, by name or from their files: what `emulate=` charges a run as."""
