"""Records in, plan out: how a model is cut for a number of devices. Never imports torch."""

from terrazzo.planner.explicit import Groups, plan_graph
from terrazzo.planner.wishes import Wishes

__all__ = ["Groups", "Wishes", "plan_graph"]
