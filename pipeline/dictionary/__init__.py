"""Dictionaries: atoms, and learning them. What other rooms use most is named here.

atoms.py has the atoms and their files, centering.py the mean that is subtracted from hidden states, learning.py the
settings and the loop, cpu.py and torch.py one minibatch of it, vectors.py what is learned from, checkpoint.py what an
interruption leaves.
"""

from pipeline.dictionary.atoms import Dictionary
from pipeline.dictionary.learning import DictionarySettings, LearningSchedule, learn_dictionary, minibatch_size

__all__ = ["Dictionary", "DictionarySettings", "LearningSchedule", "learn_dictionary", "minibatch_size"]
