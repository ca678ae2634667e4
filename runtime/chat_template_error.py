"""What is raised for a chat that cannot be rendered. Apart from `chat_template.py`, which takes 7 MiB for Jinja."""


class ChatTemplateError(ValueError):
    """A template that cannot be compiled or rendered, refuses the messages, or breaks out; one line says why.

    `field`: what was refused, "messages" or "tools".
    """

    def __init__(self, message: str, *, field: str = "messages") -> None:
        super().__init__(message)
        self.field = field
