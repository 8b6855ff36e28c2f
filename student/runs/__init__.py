"""A run on disk: its directory, identity, checkpoints, trackers and exports."""
