"""Mixed precision: how expert weights are stored, and the ladder of precisions of one run."""
