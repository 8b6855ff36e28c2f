"""What a user got wrong in a sweep."""


class SweepError(ValueError):
    """Settings of a sweep that do not go together, or a diagnostic's result that does not fit."""
