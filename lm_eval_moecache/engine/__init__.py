"""What serves an event: the cache, the layer step, and the two clocks with their links."""
