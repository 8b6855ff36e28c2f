"""Views of results: stores, and what their LSPs stand for."""
