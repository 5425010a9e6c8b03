"""Code that vLLM is given by us: reasoning parsers, tool parsers and model classes from outside its tree.

A replica's callback decides what they are, and every process of its engine registers the same. Nothing here
imports ray; vLLM and pydantic are imported only where they are used, because `vllm_entry` runs in every process
of every vLLM on a machine that has this package.
"""
