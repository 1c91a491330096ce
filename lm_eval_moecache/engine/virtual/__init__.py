"""The virtual clock and link: discrete-event time."""
