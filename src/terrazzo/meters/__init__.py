"""Meters: what a device can tell of the power it draws, one file per source."""
