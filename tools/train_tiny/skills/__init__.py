"""Generated problems in the formats of the five benchmarks: see `generator`."""
