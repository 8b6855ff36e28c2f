"""Evaluate models without fine-tuning: linear models on hidden states, similarities, word senses."""
