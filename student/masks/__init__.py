"""Choose the masked tokens of a window: at random, as words or spans, by token weights, or by the student's loss."""
