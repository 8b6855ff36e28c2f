"""What a user got wrong when asking for operations."""


class FlopsError(ValueError):
    """A model or setting whose operations cannot be counted."""
