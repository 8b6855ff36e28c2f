"""The contract between the stages: how LSP shards are written, committed and read."""
