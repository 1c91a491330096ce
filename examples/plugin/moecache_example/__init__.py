"""Rules, a trace format, a composition and a device, found by their entry points."""
