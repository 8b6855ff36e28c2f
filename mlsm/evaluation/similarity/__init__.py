"""How similar two tokens or two texts are by their LSPs, compared with hidden states."""
