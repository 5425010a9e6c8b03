"""Capture and prove: real replicas, started for the time it takes to fill a compile cache or to see it hit.

They need Ray Serve, and vLLM on the nodes; what is decided without them is in `llm_prefetch.caches`.
"""
