"""Chat messages and tools of a request, checked and put into the form that chat templates read.

In: the lists of an OpenAI request. Out: plain records for `Tokenizer.apply_chat_template`. It renders nothing.
"""

import json
from typing import Any

from graphport.runtime.server_errors import ApiError
from graphport.runtime.server_fields import Fields

# Roles of OpenAI, and the names that templates know them by.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
}
_MOST = 10_000
_TEXTS = ("name", "tool_call_id", "reasoning_content")


def chat_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages. Raises ApiError by the field's name."""
    messages = fields.items("messages")
    if not messages:
        fields.refuse("messages", "is needed: a list of at least one message", code="missing")
    if len(messages) > _MOST:
        fields.refuse("messages", f"must hold at most {_MOST} messages; got {len(messages)}")
    return [_message(Fields(message, f"messages[{i}]")) for i, message in enumerate(messages)]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.choice("role", _ROLES)
    if role is None:
        fields.refuse("role", f"is needed: one of {', '.join(_ROLES)}", code="missing")
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = fields.items("tool_calls") if role == "assistant" else None
    content = _content(fields, fields.take("content"))
    if content is None and not calls:
        fields.refuse("content", "is needed: a string, or a list of text parts", code="missing")
    message["content"] = content or ""
    for name in _TEXTS:
        value = fields.text(name)
        if value is not None:
            message[name] = value
    if calls:
        message["tool_calls"] = [_call(Fields(each, fields.name(f"tool_calls[{i}]"))) for i, each in enumerate(calls)]
    fields.leave_out({"audio": None, "function_call": None})
    fields.ignore(("refusal", "annotations"))  # which answers of OpenAI's carry, and callers send back
    fields.finish()
    return message


def _content(fields: Fields, content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        fields.refuse("content", "must be a string or a list of text parts", code="invalid_type")
    texts = []
    for i, part in enumerate(content):
        piece = Fields(part, fields.name(f"content[{i}]"))
        kind = piece.needed_text("type")
        if kind != "text":
            piece.refuse("type", f"must be text, which is all that the models here read; got {kind!r}")
        texts.append(piece.needed_text("text"))
        piece.finish()
    return "".join(texts)


def _call(fields: Fields) -> dict[str, Any]:
    """A call that the model made earlier; templates want its arguments as a record."""
    fields.choice("type", ("function",))
    call_id = fields.text("id")
    function = fields.record("function")
    if function is None:
        fields.refuse("function", "is needed: an object with name and arguments", code="missing")
    name, arguments = function.needed_text("name"), function.text("arguments") or "{}"
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        function.refuse("arguments", f"must be JSON text: {error}")
    if not isinstance(parsed, dict):
        function.refuse("arguments", "must be the JSON text of an object")
    function.finish()
    fields.ignore(("index",))
    fields.finish()
    call = {"type": "function", "function": {"name": name, "arguments": parsed}}
    return call if call_id is None else {"id": call_id, **call}


def chat_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """The tools that the prompt shall describe; None without any, and where `tool_choice` is none."""
    tools = fields.items("tools")
    choice = fields.take("tool_choice")
    if choice not in (None, "none", "auto"):
        fields.refuse("tool_choice", "must be none or auto: a model cannot be made to call a tool", code="unsupported")
    if choice is not None and not tools:
        fields.refuse("tool_choice", "needs tools")
    if not tools:
        return None
    checked = [_tool(Fields(tool, f"tools[{i}]"), tool) for i, tool in enumerate(tools)]
    return None if choice == "none" else checked


def _tool(fields: Fields, tool: dict[str, Any]) -> dict[str, Any]:
    kind = fields.needed_text("type")
    if kind != "function":
        fields.refuse("type", f"must be function; got {kind!r}")
    function = fields.record("function")
    if function is None:
        fields.refuse("function", "is needed: an object with name, description, parameters", code="missing")
    function.needed_text("name")
    function.text("description")
    function.record("parameters")
    if function.flag("strict"):
        raise ApiError(
            400,
            f"{function.name('strict')} must be left out or false: calls of tools are not constrained",
            param=function.name("strict"),
            code="unsupported",
        )
    function.finish()
    fields.finish()
    return tool
