"""Pseudo-log-likelihoods of sentences: the scorer that score-text and evaluate-blimp share, and score-text itself."""
