"""What users can cause, as one tree; every message has three parts: asked, fact, remedy.

    BatchwrightError
    |-- ConfigError            a setting is out of range, or would have no effect
    |-- RequestError           one request cannot be served; the others are unharmed
    |-- ModelError             a model cannot be loaded
    |   |-- UnsupportedModel   its family or weight format is not one we run
    |   `-- BrokenWeights      a file is missing, truncated or does not match its config
    |-- InputError             a file or argument given to a command cannot be used
    |-- UnknownFact            a number that nobody measured and no table holds was asked for
    `-- MissingDependency      an optional package is needed; the message names the command

Our own bugs are `assert`s, never one of these.
"""


class BatchwrightError(Exception):
    """`asked`: what was wanted; `fact`: what is true, with numbers; `remedy`: what to do about it."""

    def __init__(self, asked: str, fact: str, remedy: str) -> None:
        super().__init__(f"{asked}: {fact}; {remedy}")
        self.asked, self.fact, self.remedy = asked, fact, remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.asked, self.fact, self.remedy)


class ConfigError(BatchwrightError):
    """A setting is out of range, contradicts another, or would have no effect."""


class RequestError(BatchwrightError):
    """One request cannot be served; the rest are unharmed."""


class ModelError(BatchwrightError):
    """A model cannot be loaded."""


class UnsupportedModel(ModelError):
    """The model's family, or the format of its weights, is not one we run."""


class BrokenWeights(ModelError):
    """A weight file is missing, truncated, or does not match the model's config."""


class InputError(BatchwrightError):
    """A file or argument given to a command cannot be used."""


class UnknownFact(BatchwrightError):
    """A number was asked for that no table holds and nobody measured here."""


class MissingDependency(BatchwrightError):
    """An optional package is needed; the remedy is the command that installs it."""
