"""A whole study from one recipe: encoding, students, probes, evaluations and their comparison, in one command."""
