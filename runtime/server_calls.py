"""What callers may ask for by HTTP, read from the fields of a JSON body.

In: a JSON object. Out: `GenerationCall` and `EmbeddingCall`, every field checked by itself. It knows no models: what
depends on one (lengths, vocabulary, template) is checked when the call meets it.
"""

from dataclasses import dataclass
from typing import Any

from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.server_errors import ApiError, refusal
from graphport.runtime.server_fields import Fields
from graphport.runtime.server_messages import chat_messages, chat_tools

# Accepted and without effect: they change no token here.
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
# Fields of OpenAI that would change the answer, and the one value that asks for nothing.
_UNSUPPORTED_IN_COMPLETIONS = {"suffix": None, "echo": False}
_UNSUPPORTED_IN_CHATS = {
    "audio": None,
    "function_call": None,
    "functions": None,
    "modalities": ["text"],
    "moderation": None,
    "prediction": None,
    "prompt_cache_options": None,
    "reasoning_effort": None,
    "verbosity": None,
    "web_search_options": None,
}
_OWN = ("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")  # of OpenAI, by the same name
_EXTRA = (  # of vLLM's server, by the same name
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "bad_words",
    "regex",
    "grammar",
)
_COMPLETION_TOKENS = 16  # OpenAI's default
_MOST_STRINGS = {"stop": 16, "bad_words": 1024}  # each is looked for with every token, or read before the first
_MOST_LOGPROBS = 20
_MOST_TEXTS = 2048  # OpenAI's bound

Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """A call of /v1/completions (`prompts`) or /v1/chat/completions (`messages`).

    `limit`: the new tokens that were asked for by name, None if none were. `logprobs`: whether they are reported.
    `timeout`: in seconds, None for the server's own. `ignored`: fields that were given and have no effect.
    """

    model: str
    params: SamplingParams
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    limit: int | None = None
    limit_field: str = "max_tokens"
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    timeout: float | None = None
    ignored: tuple[str, ...] = ()

    @property
    def is_chat(self) -> bool:
        """Whether it has messages."""
        return bool(self.messages)

    @property
    def num_sequences(self) -> int:
        """Places in the batch or the queue that it needs."""
        return self.params.n * (1 if self.is_chat else len(self.prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """A call of /v1/embeddings. `as_base64`: whether vectors are sent as base64 of little-endian float32."""

    model: str
    texts: tuple[Prompt, ...]
    as_base64: bool = False
    dimensions: int | None = None
    ignored: tuple[str, ...] = ()


def read_completion(record: dict[str, Any]) -> GenerationCall:
    """A call of /v1/completions. Raises ApiError by the field's name."""
    fields = Fields(record)
    model, prompts = fields.needed_text("model"), _texts(fields, "prompt")
    limit = _sampling("max_new_tokens", fields.take("max_tokens"), "max_tokens")
    count = fields.count("logprobs", low=0, high=_MOST_LOGPROBS)
    options = _sampling_options(fields) | ({} if count is None else {"logprobs": count})
    n = options.get("n", 1)
    best_of = fields.count("best_of", low=1, high=1 << 16)
    if best_of not in (None, n):
        fields.refuse("best_of", f"must be left out or {n}, as n is: nothing is ranked", code="unsupported")
    fields.leave_out(_UNSUPPORTED_IN_COMPLETIONS)
    return GenerationCall(
        model=model,
        prompts=prompts,
        limit=limit,
        logprobs=count is not None,
        params=_params(options, _COMPLETION_TOKENS if limit is None else limit),
        **_manner(fields),
    )


def read_chat(record: dict[str, Any]) -> GenerationCall:
    """A call of /v1/chat/completions. Raises ApiError by the field's name."""
    fields = Fields(record)
    model, messages, tools = fields.needed_text("model"), chat_messages(fields), chat_tools(fields)
    limits = {
        name: _sampling("max_new_tokens", value, name)
        for name in ("max_completion_tokens", "max_tokens")
        if (value := fields.take(name)) is not None
    }
    if len(limits) > 1:
        fields.refuse("max_tokens", "is max_completion_tokens under an older name: give one of them")
    limit_field, limit = next(iter(limits.items()), ("max_tokens", None))
    logprobs = fields.flag("logprobs")
    top = fields.count("top_logprobs", low=0, high=_MOST_LOGPROBS)
    if top is not None and not logprobs:
        fields.refuse("top_logprobs", "needs logprobs to be true")
    options = _sampling_options(fields) | ({"logprobs": top or 0} if logprobs else {})
    schema = _response_schema(fields)
    if schema is not None:
        options["json_schema"] = _sampling("json_schema", schema, "response_format")
    fields.leave_out(_UNSUPPORTED_IN_CHATS)
    return GenerationCall(
        model=model,
        messages=tuple(messages),
        tools=None if tools is None else tuple(tools),
        limit=limit,
        limit_field=limit_field,
        logprobs=logprobs,
        params=_params(options, limit),
        **_manner(fields),
    )


def read_embedding(record: dict[str, Any]) -> EmbeddingCall:
    """A call of /v1/embeddings. Raises ApiError by the field's name."""
    fields = Fields(record)
    call = EmbeddingCall(
        model=fields.needed_text("model"),
        texts=_texts(fields, "input"),
        as_base64=fields.choice("encoding_format", ("float", "base64")) == "base64",
        dimensions=fields.count("dimensions", low=1, high=1 << 16),
        ignored=fields.ignore(("user",)),
    )
    fields.finish()
    return call


def _texts(fields: Fields, name: str) -> tuple[Prompt, ...]:
    """A text, a list of texts, a list of ids, or a list of lists of ids; what ids may be, the model says."""
    value = fields.take(name)
    allowed = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if value is None:
        fields.refuse(name, f"is needed: {allowed}", code="missing")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        fields.refuse(name, f"must be {allowed}", code="invalid_type")
    if not value:
        fields.refuse(name, f"is empty; it must be {allowed}")
    kinds = {type(each) for each in value}
    if kinds == {int}:
        return (value,)
    if len(kinds) > 1 or not kinds <= {str, list}:
        fields.refuse(name, f"must be {allowed}, and not a mixture", code="invalid_type")
    if len(value) > _MOST_TEXTS:
        fields.refuse(name, f"must hold at most {_MOST_TEXTS} texts; got {len(value)}")
    return tuple(value)


def _manner(fields: Fields) -> dict[str, Any]:
    """How the answer is given; the fields that are left are refused."""
    stream, options = fields.flag("stream"), fields.record("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            fields.refuse("stream_options", "needs stream to be true")
        include_usage = options.flag("include_usage")
        options.ignore(("include_obfuscation",))
        options.finish()
    timeout = fields.take("timeout")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e9
    ):
        fields.refuse("timeout", f"must be a number of seconds above 0 and below 1e9; got {timeout!r}")
    ignored = fields.ignore(IGNORED)
    fields.finish()
    return {"stream": stream, "include_usage": include_usage, "timeout": timeout, "ignored": ignored}


def _sampling_options(fields: Fields) -> dict[str, Any]:
    """Arguments of SamplingParams, each checked by itself, so that the field to blame is known."""
    found = {name: _sampling(name, fields.take(name), name) for name in (*_OWN, *_EXTRA)}
    found["stop"] = _sampling("stop", fields.take("stop"), "stop")
    for name, most in _MOST_STRINGS.items():
        strings = found[name]
        if isinstance(strings, list) and len(strings) > most:
            fields.refuse(name, f"must hold at most {most} strings; got {len(strings)}")
    bias = fields.record("logit_bias")
    if bias is not None:
        found["logit_bias"] = _sampling("logit_bias", _numbered(bias), "logit_bias")
    return {name: value for name, value in found.items() if value is not None}


def _numbered(bias: Fields) -> dict[int, Any]:
    """Biases by id: the keys of a JSON object are strings."""
    numbered = {}
    for key in bias.names():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise ApiError(
                400, f"logit_bias has the key {key!r}; keys are token ids", param="logit_bias", code="invalid_value"
            )
        if int(key) in numbered:
            raise ApiError(
                400,
                f"logit_bias has the id {int(key)} twice, the second time as {key!r}; give each id once",
                param="logit_bias",
                code="invalid_value",
            )
        numbered[int(key)] = bias.take(key)
    return numbered


def _sampling(name: str, value: Any, field: str) -> Any:  # noqa: ANN401 - a JSON value, checked here
    """`value` if SamplingParams takes it as its argument `name`; the refusal names `field`."""
    if value is None:
        return None
    try:
        SamplingParams(**{name: value})
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise refusal(kind(str(error).replace(f"{name}=", f"{field}=", 1)), field) from error
    return value


def _params(options: dict[str, Any], limit: int | None) -> SamplingParams:
    try:
        return SamplingParams(max_new_tokens=limit, **options)
    except (TypeError, ValueError) as error:  # fields that are right alone
        raise refusal(error, "response_format" if "json_schema" in options else "grammar") from error


def _response_schema(fields: Fields) -> dict[str, Any] | None:
    """The schema that `response_format` asks for."""
    asked = fields.record("response_format")
    if asked is None:
        return None
    kind = asked.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        asked.refuse("type", "is needed: text, json_object or json_schema", code="missing")
    schema: dict[str, Any] | None = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        inner = asked.record("json_schema")
        if inner is None:
            asked.refuse("json_schema", "is needed: an object with name and schema", code="missing")
        inner.needed_text("name")
        inner.text("description")
        inner.flag("strict")  # a schema is always followed
        schema = inner.take("schema")
        if not isinstance(schema, dict):
            inner.refuse("schema", "is needed: a JSON schema, which is an object", code="missing")
        inner.finish()
    asked.finish()
    return schema
