"""Tasks that a model is tested on: BLiMP's minimal pairs, and ten tasks to fine-tune on. Each writes records."""
