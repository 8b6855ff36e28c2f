"""Benchmarks behind the claims in the README; each prints JSON as its last line."""
