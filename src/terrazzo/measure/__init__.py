"""Measures devices and links, and keeps what was found as a Profile."""
