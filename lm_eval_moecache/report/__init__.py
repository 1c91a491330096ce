"""From the ledger to what users read: metrics, tables."""
