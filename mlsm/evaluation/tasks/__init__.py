"""Evaluation tasks: BLiMP's minimal pairs, and ten tasks for fine-tuning. Each writes records."""
