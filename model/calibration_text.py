"""Texts that weights are calibrated and measured on when no others are given: two that share no sentence."""

import sys
from pydoc_data import topics

from model.sample_text import LONG_TEXT

__all__ = ["EVALUATION", "EVALUATION_NAME", "NAME", "TEXT"]

TEXT = "\n".join(topics.topics[name] for name in sorted(topics.topics))
"""Prose and examples of Python's language reference, as ``help()`` of the running Python shows them."""

NAME = f"pydoc_data.topics of Python {sys.version_info.major}.{sys.version_info.minor}"

EVALUATION = LONG_TEXT
EVALUATION_NAME = "model/sample_text.py, LONG_TEXT"
