"""Find out which LSPs of one store correspond to those of another, by the tokens on which they are heavy."""
