"""Looking at what was made: stores, and what their LSPs stand for."""
