"""Dictionaries: atoms, and learning them. The names that other packages use most are imported here.

atoms.py has the atoms and their files, centering.py the mean that is subtracted from hidden states, learning.py the
settings and the loop, cpu.py and torch.py one minibatch of it, vectors.py the training vectors, checkpoint.py the state
of an interrupted run.
"""

from pipeline.dictionary.atoms import Dictionary
from pipeline.dictionary.learning import DictionarySettings, LearningSchedule, learn_dictionary

__all__ = ["Dictionary", "DictionarySettings", "LearningSchedule", "learn_dictionary"]
