"""Measure the entropy of targets, and find settings that give other targets the same entropy."""
