"""Studies of the method: which layer to encode, students over layers or k, what pre-training costs."""
