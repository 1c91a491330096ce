"""What rules learned offline: arrays of an artifact, and what a rule reads from them."""
