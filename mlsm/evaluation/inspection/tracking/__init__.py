"""Which LSPs of one store are those of another, by where they are heavy."""
