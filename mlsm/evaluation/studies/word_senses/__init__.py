"""Which layer of a teacher to take: how well its LSPs tell word senses apart (choose-layer)."""
