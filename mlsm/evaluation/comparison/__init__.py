"""Averages, significance and figures from records of evaluations."""
