"""Messages in, prompt text out, by the model's own Jinja template: the same text as `transformers` renders.

In: the template's source, the names of special tokens, messages. Out: a string. It does not tokenise, and it trusts
neither template nor messages: see `template_sandbox.py` for the bounds.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta

from graphport.model_def.signature import SPECIAL_TOKEN_NAMES
from graphport.runtime.chat_template_error import ChatTemplateError
from graphport.runtime.template_sandbox import Budget, TemplateSandbox
from graphport.runtime.template_sizes import require_size

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # the standard name first, as in `transformers`
_MAX_DEPTH = 64  # of lists and mappings inside a message


class ChatTemplate:
    """One compiled template. `special_tokens` maps names such as "bos_token" to the tokens' text; None: none is known.

    Raises ChatTemplateError if the source does not compile or is too long.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self._lock = threading.Lock()  # the sandbox holds the budget of one rendering
        self._sandbox = TemplateSandbox()
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = self._sandbox.compile_bounded(source)
            used = meta.find_undeclared_variables(self._sandbox.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {_one_line(error)}") from error
        self._unknown = sorted(used & set(SPECIAL_TOKEN_NAMES)) if special_tokens is None else []
        self._takes_tools = "tools" in used

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text for `messages` (at least one; values are plain JSON data; keys that are None are left out).

        tools: descriptions of functions, for a template that writes them into the prompt.
        Raises ChatTemplateError for whatever goes wrong inside the template, for messages of another form, and for
        tools that the template would pass over in silence.
        """
        if tools is not None and not self._takes_tools:
            raise ChatTemplateError("the model's chat template takes no tools: leave them out", field="tools")
        if self._unknown:
            raise ChatTemplateError(
                f"the chat template uses {', '.join(self._unknown)}, but nothing says what these tokens are: "
                "put the model's tokenizer_config.json beside the template"
            )
        variables = {
            "messages": _plain_messages(messages),
            "tools": None if tools is None else [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        with self._lock:
            self._sandbox.budget = Budget()
            try:
                return self._render(variables)
            except Exception as error:  # template code may raise anything; all of it is the template's failure
                raise ChatTemplateError(f"the chat template failed: {_one_line(error)}") from error

    def _render(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(variables):
            size += len(piece)
            require_size(size)
            pieces.append(piece)
        return "".join(pieces)


def _plain_messages(messages: object) -> list[dict[str, object]]:
    """Fresh JSON data, so that a template sees no object with methods of its own."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages must be a list of mappings with role and content, not {_kind(messages)}")
    if not messages:
        raise ChatTemplateError("messages is empty: a chat needs at least one message")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: object, place: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{place} must be a mapping with role and content, not {_kind(message)}")
    plain = {str(key): _plain(value, f"{place}[{key!r}]") for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: object, place: str, *, depth: int = 0) -> object:
    if depth > _MAX_DEPTH:
        raise ChatTemplateError(f"{place[:80]}... is nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # subclasses (enumerations, NumPy's) lose their own methods
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{place}[{key!r}]", depth=depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{place}[{i}]", depth=depth + 1) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise ChatTemplateError(f"{place} must be plain JSON data (text, numbers, lists, mappings), not {_kind(value)}")


def _kind(value: object) -> str:
    return type(value).__name__


def _one_line(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[:300]}{'' if line is None else f' (line {line})'}"
