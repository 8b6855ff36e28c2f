"""Evaluation data, from the archives in which they are published to the layout that the evaluations read.

config.py     settings of prepare-data
archives.py   files by name, in a directory and in the archives there
sets.py       what belongs to each set, where it is published, how it is checked
prepare.py    find, write, check, publish
"""
