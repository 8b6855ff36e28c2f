"""Choose a layer of a teacher by how well its LSPs distinguish word senses (choose-layer)."""
