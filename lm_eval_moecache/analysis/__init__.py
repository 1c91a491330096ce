"""The papers' analyses, on any model and text, as tables and pictures."""
