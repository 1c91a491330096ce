"""The wall clock and a real link: a worker thread that copies experts."""
