"""What each latent semantic property stands for: tokens, contexts, neighbours, senses."""
