"""A text file that the user names, as a string.

In: a path. Out: its text, or one line that says why there is none. It splits and tokenises nothing.
"""

from pathlib import Path


def read_text(path: Path, *, argument: str) -> str:
    """The file's text. Raises ValueError when there is none, or it is no UTF-8, and says where.

    `argument` is what names the file on the command line, for the messages.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"no file at {path}; {argument} names a text in UTF-8") from error
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder; {argument} names one file of text in UTF-8") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} is no UTF-8: byte 0x{data[error.start]:02X} at position {error.start} (line {line}); convert it, "
            "for example with iconv -t UTF-8"
        ) from error
