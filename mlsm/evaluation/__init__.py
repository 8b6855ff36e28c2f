"""Inspection and evaluation of results: views of stores and LSPs, tasks, comparisons, studies."""
