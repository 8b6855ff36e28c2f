"""Models measured without fine-tuning: linear models on their hidden states, similarities, word senses."""
