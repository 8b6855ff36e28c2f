"""How alike two tokens or two texts are by their LSPs, beside hidden states."""
