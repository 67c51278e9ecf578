"""Power modes: knobs, what they do to time and power, and which mode to choose."""
