"""Scores for responses: a registry of `compute_score` functions and the pool that runs them.

Import from the modules (`registry`, `runner`); this package stays empty so that the scoring
processes load nothing that they do not need.
"""
