"""Who belongs to a run: how devices agree on it when one is lost, and the connections for that."""

from terrazzo.members.view import View, goes_on

__all__ = ["View", "goes_on"]
