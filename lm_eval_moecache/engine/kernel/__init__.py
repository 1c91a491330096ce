"""The only statement of time, residency and prefetching: functions over records in memory.

`serve` is its one entry. numba compiles it; plain Python runs the same source, slowly.
"""
