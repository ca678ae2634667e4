"""The Jinja environment that chat templates run in: the one `transformers` uses, and bounded in time and size.

In: template source, which comes with the model and is not trusted. Out: a compiled template. It knows nothing of
messages (see `chat_template.py`). Any exception may leave a template; the caller turns them into one kind.

Every loop item, call and `*`, `**`, `+`, `%`, `~` is counted against a `Budget`, and what an operation could produce is
estimated before it runs. The budget belongs to the environment: render one template at a time.
"""

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graphport.runtime.template_sizes import (
    TemplateLimitError,
    require_call,
    require_format,
    require_operation,
    require_size,
    size_of,
)

MAX_SOURCE = 1 << 18  # characters of a template; the longest published ones have about 30,000
MAX_STEPS = 1_000_000  # loop items, calls and operations
MAX_SECONDS = 2.0  # of this thread's processor time, so that a busy machine refuses nothing


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._steps = 0
        self._written = 0
        self._deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """Count a loop item, a call or an operation."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"the template takes more than {MAX_STEPS} steps")
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"the template takes more than {MAX_SECONDS} seconds")

    def write(self, characters: int) -> None:
        """Count text that goes to the prompt or to a block on its way there."""
        self._written += characters
        require_size(self._written)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """What `transformers` gives a template, and bounds; without `lipsum`.

    That is `trim_blocks`, `lstrip_blocks`, loop controls, `{% generation %}`, `tojson` that escapes nothing,
    `raise_exception`, `strftime_now`, and `dict` and `namespace` that reach nothing else.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], finalize=self._written
        )
        self.budget = Budget()
        self._text_sizes: dict[str, int] = {}
        self.filters["tojson"] = _to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = self._guarded_filter(name, function)
        self.filters["bounded_loop"] = self._bounded_loop
        self.filters["bounded_text"] = self._bounded_text
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.globals.update(dict=_new_dict, namespace=_Namespace)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile `source` with every loop and `~` counted. Raises jinja2.TemplateError or TemplateLimitError."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"the template has {len(source)} characters, more than {MAX_SOURCE}")
        self.budget = Budget()  # constant expressions are computed here
        tree = self.parse(source)
        for macro in tree.find_all((nodes.Macro, nodes.CallBlock)):
            name = macro.name if isinstance(macro, nodes.Macro) else "caller"
            self._text_sizes[name] = max(self._text_sizes.get(name, 0), _constant_text(macro))
        for loop in list(tree.find_all(nodes.For)):
            size = nodes.Const(_constant_text(loop))
            loop.iter = nodes.Filter(loop.iter, "bounded_loop", [size], [], None, None, lineno=loop.lineno)
        self._bound_texts(tree)
        return self.from_string(tree)

    def _bound_texts(self, node: nodes.Node) -> None:
        for child in node.iter_child_nodes():
            self._bound_texts(child)
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(node, name, _bounded_concat(value))
            elif isinstance(value, list):
                value[:] = [_bounded_concat(item) if isinstance(item, nodes.Concat) else item for item in value]

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Estimate the result's size, then compute."""
        self.budget.step()
        require_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, ANN401 - as in Jinja
        """Count the call, and estimate what a text method could make."""
        __self.budget.step()
        if isinstance(__obj, Macro):
            __self.budget.write(__self._text_sizes.get(__obj.name, 0))
        elif isinstance(__obj, LoopContext) and args:  # a recursive loop
            args = (__self._bounded_loop(args[0], max(__self._text_sizes.values(), default=0)), *args[1:])
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            require_call(__obj.__name__, owner, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def unsafe_undefined(self, obj: object, attribute: str) -> Undefined:
        """Refuse private attributes at once (Jinja would render them as nothing); others, such as `append`, on use."""
        if attribute.startswith("_"):
            raise SecurityError(f"the template reaches for {attribute!r} of a {type(obj).__name__}")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """Refuse `str.format` with enormous or computed widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: object, **kwargs: object) -> str:
            require_format(str(getattr(value, "__self__", "")), (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded

    def _guarded_filter(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        passes_context = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)  # keeps Jinja's marks: pass the context, the environment
        def guarded(*args: object, **kwargs: object) -> object:
            self.budget.step()
            passed, (value, *others) = args[:passes_context], args[passes_context:]
            if name == "join" and isinstance(value, Iterator):
                value = list(value)
            require_call(name, value, (*others, *kwargs.values()))
            return function(*passed, value, *others, **kwargs)

        return guarded

    def _bounded_loop(self, items: Iterable[object], text_size: int) -> Iterator[object]:
        for item in items:
            self.budget.step()
            self.budget.write(text_size)
            yield item

    def _bounded_text(self, parts: list[object]) -> str:
        self.budget.step()
        require_size(size_of(parts))
        return "".join(map(str, parts))

    def _written(self, value: object) -> object:
        self.budget.write(size_of(value))
        return value


class _GenerationTag(Extension):
    """`{% generation %}`: marks what the model says, for training; rendering shows the body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, as in `transformers`."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as in Jinja
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not hold {name!r}")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as dict itself
    return dict(*args, **kwargs)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _bounded_concat(node: nodes.Concat) -> nodes.Filter:
    parts = nodes.List(node.nodes, lineno=node.lineno)
    return nodes.Filter(parts, "bounded_text", [], [], None, None, lineno=node.lineno)


def _constant_text(node: nodes.Node) -> int:
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))
