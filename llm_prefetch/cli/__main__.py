"""`python -m llm_prefetch.cli`."""

import sys

from llm_prefetch.cli import main

sys.exit(main())
