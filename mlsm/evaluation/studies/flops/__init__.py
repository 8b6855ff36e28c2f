"""Count the operations of pre-training: the paper's table 3, the parts it omits, and savings by sharing stores."""
