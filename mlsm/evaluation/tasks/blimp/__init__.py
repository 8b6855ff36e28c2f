"""BLiMP: which of two sentences does a masked language model find likelier?"""
