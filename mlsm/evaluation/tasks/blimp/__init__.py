"""BLiMP: to which of two sentences does a masked language model give the higher probability?"""
