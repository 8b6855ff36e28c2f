"""All that touches transformers' modules: which encoder, its last layer, [MASK] later, products on a CPU."""
