"""Serves events: caches, decisions, and two clocks (virtual and wall), each with its link."""
