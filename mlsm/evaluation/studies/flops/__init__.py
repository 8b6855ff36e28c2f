"""Operations of pre-training: the paper's table 3, what it leaves out, and what one encoding for many runs saves."""
