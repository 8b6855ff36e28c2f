"""Code that builds or changes transformers' modules: encoders, last layer, [MASK] later, CPU matrix products."""
