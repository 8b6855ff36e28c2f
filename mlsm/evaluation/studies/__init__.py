"""Studies of the method: which layer to encode, students by layer or k, the cost of pre-training."""
