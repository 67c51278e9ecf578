"""From a loader on one device to the boxes that every device needs."""

from terrazzo.feed.feed import feed

__all__ = ["feed"]
