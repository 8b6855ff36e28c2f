"""Stage B: shards to a trained encoder."""
