"""Stage A: text to LSP shards."""
