"""How sharp targets are, and which settings give other targets the same sharpness."""
