"""Generated problems in the formats of the five benchmarks: `generator` has them all."""
