"""The machine's clock and link: a worker that really copies."""
