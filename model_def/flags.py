"""Switches that a caller gives, checked before anything is done.

In: values by name. Out: nothing, or an error in one line. What a switch does stands where it is read.
"""


def require_flags(**flags: object) -> None:
    """Raise TypeError for a value that is not True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {value!r} ({type(value).__name__})")


def require_optional_flags(**flags: object) -> None:
    """The same for switches that may be None, which leaves the choice to what is opened."""
    require_flags(**{name: value for name, value in flags.items() if value is not None})
