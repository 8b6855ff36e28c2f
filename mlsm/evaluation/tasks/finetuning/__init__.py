"""The fine-tuning suite: ten tasks, paired heads, one record for every task and seed."""
