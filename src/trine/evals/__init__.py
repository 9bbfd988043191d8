"""Evaluations: bits per byte of held-out text, and what ordinary compressors and n-grams reach on the same bytes.

Import the part you need (``trine.evals.bits``, ``trine.evals.baselines``); this file loads nothing.
"""
