"""Eight hooks over the whole start of a replica, for classes that need not know Ray or us.

`callback` runs them where Ray calls its callback; `server`, named as `server_cls`, adds the phases that Ray's callback
cannot see: the placement group, and what comes after the engine is up.
"""

from llm_prefetch.serve.lifecycle.callback import LifecycleCallback
from llm_prefetch.serve.lifecycle.context import NodeInitializationContext
from llm_prefetch.serve.lifecycle.hooks import HOOKS, NodeInitializationCallback

__all__ = ["HOOKS", "LifecycleCallback", "NodeInitializationCallback", "NodeInitializationContext"]
