"""Stage, verify and commit everything an LLM replica needs on its node before it is scheduled."""

__version__ = "0.1.0"
