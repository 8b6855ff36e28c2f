"""What can stop a training run. Light to import, so that the command line can name them."""


class RunError(ValueError):
    """The run directory, the store or the settings do not belong together."""


class TrainingError(RuntimeError):
    """Training cannot go on: a loss or gradient that is not finite, or too little memory."""


class PeerError(TrainingError):
    """Another process of the same run ended or hangs, so this one cannot go on."""


class WriteError(OSError):
    """A file of the run could not be written; what was whole before is still there."""


class Interrupted(KeyboardInterrupt):
    """A signal (SIGINT, SIGTERM or SIGHUP) arrived; a checkpoint was saved and the same command continues from it."""

    def __init__(self, message, number):
        super().__init__(message)
        self.number = number
