"""Routing traces: the file format, importers, the recorder, and the future that oracles see."""
