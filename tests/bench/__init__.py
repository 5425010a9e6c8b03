"""The numbers that we quote: `make bench`, or `python -m tests.bench --help`. Prints, and asserts nothing on time."""
