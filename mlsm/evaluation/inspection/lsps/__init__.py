"""Show what each latent semantic property stands for: its tokens, contexts, neighbours and senses."""
