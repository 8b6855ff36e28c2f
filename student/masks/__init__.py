"""Which tokens of a window are masked: at random, in words and spans, by weights of the tokens, or by the student."""
