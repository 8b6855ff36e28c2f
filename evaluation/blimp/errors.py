"""What a person can put right before BLiMP is scored. Light to import."""


class BlimpError(ValueError):
    """Data or a model that cannot be used; the message says what was found and what to do next."""
