"""What users read of a run: metrics from the ledger, tables, plots, comparisons."""
