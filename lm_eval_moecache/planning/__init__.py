"""Forecasts of what programs make of machines: models, machines, placements, speeds and rows."""
