"""Staging on a real Ray cluster of several hosts."""
