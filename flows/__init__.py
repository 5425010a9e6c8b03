"""Prefect flows of llm-prefetch: decorators and wiring only."""
