"""Pseudo-log-likelihoods of sentences: the scorer shared by score-text and evaluate-blimp, and score-text itself."""
