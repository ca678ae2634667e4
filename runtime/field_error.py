"""The refusal of one field of a request, which says by name which field it was.

In: a message and a name. Out: an exception whose `field` a server can translate into the name that its caller used. It
checks nothing.
"""


class FieldError(ValueError):
    """`field`: a name of SamplingParams, or "prompt"."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field
