"""What runs inside a Ray Serve LLM replica. Name it in the Serve YAML as `llm_prefetch.serve.PrefetchCallback`."""

from llm_prefetch.serve.callback import PrefetchCallback

__all__ = ["PrefetchCallback"]
