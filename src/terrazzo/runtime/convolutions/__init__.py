"""Convolutions and their gradients, each by the fastest way there is on this processor."""
