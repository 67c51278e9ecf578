"""The demo: a small detector trained on several devices and on one, side by side."""
