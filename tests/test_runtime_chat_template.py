"""Chat templates: the text that transformers renders, and hostile or broken templates and messages refused in time."""

import time

import jinja2
import pytest

# private, but what apply_chat_template gives the template: the reference is meaningless without it (transformers 5)
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

from graphport.runtime.chat_template import ChatTemplate
from graphport.runtime.chat_template_error import ChatTemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>there</b> & 'you' é👋"},
    {"role": "assistant", "content": "Hello!", "reasoning": "greet back"},
    {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image"}], "name": None},
)

TEMPLATES = {
    "chatml": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\n' ~ message['content'] ~ '<|im_end|>' + '\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama": """{{- bos_token }}
    {%- set ns = namespace(last='', n=0) -%}
    {%- for message in messages recursive %}
        {%- set ns.last = ns.last ~ message.role ~ loop.index ~ '/' ~ loop.length ~ loop.revindex %}
        {%- if loop.previtem is defined and loop.last %}{{ eos_token }}{% endif %}
        {%- if message.content is string %}{{ message.content | trim | upper }}
        {%- else %}
            {%- for p in message.content if p.type == 'text' %}{{ p.text | replace('this', 'that') }}{% endfor %}
        {%- endif %}
    {%- endfor %}
    {{- ns.last }}""",
    "json": """{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ '<&>' | tojson }} {{ messages }}
{% for key, value in messages[0].items() %}{{ key }}={{ value | string | length }};{% endfor %}
{{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ dict(a=1, b='x').items() | list }} {{ messages[:2] | map(attribute='content') | join('\n') | indent(4) }}""",
    "macros": """{% macro show(m, depth=0) %}{{ '  ' * depth }}{{ m.role }}{% if depth < 3 %}
{{ show(m, depth + 1) }}{% endif %}{% endmacro %}{% set text %}{{ show(messages[0]) }}{% endset %}{{ text }}
{% generation %}{{ messages[2].content }}{% endgeneration %}{% macro wrap(m) %}[{{ caller(m.role) }}]{% endmacro %}
{% call(x) wrap(messages[1]) %}<{{ x }}>{% endcall %}""",
    "control": """{% for i in range(10) %}{% if i == 2 %}{% continue %}{% elif i == 5 %}{% break %}{% endif %}{{ i }}
{%- endfor %}{{ 7 // 2 ** 2 % 3 - 1 }}{{ '%s=%d' % ('a', 3) }}{{ '{:>5}|{}'.format('x', 2) }}{{ '%03d' | format(7) }}
{{ 'a,b'.split(',') | join('+') }}{{ [1, 2] + [3] }}{{ 'x'.ljust(3) }}{{ ['a'] * 3 }}{{ 'abc'[::-1] }}
{% for x in undefined_thing %}{{ x }}{% else %}none{% endfor %}{{ messages[2].thinking }}
{{ messages[2].reasoning_content }}
    {% if tools is none and documents is none %}  indented
    {% endif %}
trailing
""",
    "empty": "",
}


def rendered(source: str, messages: object = CHAT, **kwargs: bool) -> str:
    return ChatTemplate(source, special_tokens=SPECIAL).render(messages, **kwargs)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_b123_rendered_text_equals_that_of_transformers(name: str, prompt: bool) -> None:
    source = TEMPLATES[name]
    chat = _normalize_chat_messages(list(CHAT))
    reference, _ = render_jinja_template([chat], chat_template=source, add_generation_prompt=prompt, **SPECIAL)
    assert rendered(source, add_generation_prompt=prompt) == reference[0]


def test_b123_the_date_is_that_of_today() -> None:
    source = "{{ strftime_now('%Y') }}"
    assert rendered(source) == time.strftime("%Y")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ dict.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{0.__class__}'.format_map({'0': ''}).x.y }}",
        "{% set ns = namespace(__class__='x') %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_b123_a_template_cannot_reach_out_or_change_the_messages(attack: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ChatTemplateError, match=r"chat template (failed|does not compile)"):
        rendered(attack, messages)
    assert messages == [{"role": "user", "content": "x"}]


BIG = "{% set s = 'x' * 16000000 %}"


@pytest.mark.parametrize(
    "attack",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) recursive %}{{ loop(range(90000)) }}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'.zfill(10**10) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ [1] | slice(10**9) | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**9) }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        BIG + "{{ s ~ s }}",
        BIG + "{{ s + s }}",
        BIG + "{{ s }}{{ s }}",
        BIG + "{{ s | replace('x', s) }}",
        BIG + "{{ s.replace('x', 'xx') }}",
        BIG + "{{ [s, s, s] | join }}",
        BIG + "{{ ','.join([s, s]) }}",
        BIG + "{{ [s, s] | map('upper') | join }}",
        BIG + "{{ [s, s] }}",
        BIG + "{{ [s, s] | string | length }}",
        BIG + "{{ [[s], {'a': s}] | tojson | length }}",
        BIG + "{{ '%s%s' % (s, s) }}",
        BIG + "{{ '{0}{0}'.format(s) }}",
        "{% set t %}{% for i in range(9000) %}" + "y" * 9000 + "{% endfor %}{% endset %}",
        "{% macro f() %}"
        + "y" * 9000
        + "{% endmacro %}{% set t = [] %}{% for i in range(9000) %}{{ f() }}{% endfor %}",
        "{{ lipsum(n=100000) }}",
        "{{ messages" + "[0]" * 20000 + " }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "x" * 1000000,
    ],
)
def test_b123_a_template_that_takes_too_long_or_too_much_is_refused_quickly(attack: str) -> None:
    start = time.process_time()
    with pytest.raises(ChatTemplateError):
        rendered(attack)
    assert time.process_time() - start < 4


def test_b123_long_but_honest_chats_are_rendered() -> None:
    messages = [{"role": "user", "content": "word " * 2000}] * 400  # four million characters
    text = rendered("{% for m in messages %}{{ m['role'] + ': ' + m['content'] | trim }}\n{% endfor %}", messages)
    assert len(text) == 400 * (len("user: ") + 9999 + 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'x' | no_such_filter }}", r"does not compile: No filter named 'no_such_filter'.*\(line 1\)"),
        ("a\n{% for %}", r"does not compile: .*\(line 2\)"),
        ("{{ raise_exception('roles must\nalternate') }}", r"^the chat template failed: roles must alternate$"),
        ("{{ messages[0].nothing.more }}", r"failed: .*no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
    ],
)
def test_b123_a_failure_is_one_clear_line(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        rendered(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hi", "must be a list of mappings with role and content, not str"),
        (["hi"], r"messages\[0\] must be a mapping"),
        ([{"role": "user", "content": object()}], r"messages\[0\]\['content'\] must be plain JSON data.*not object"),
    ],
)
def test_messages_of_another_form_are_refused(messages: object, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        rendered("x", messages)


def test_messages_that_hold_themselves_are_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ChatTemplateError, match="nested more than 64 deep"):
        rendered("x", [{"role": "user", "content": loop}])


def test_the_callers_messages_stay_as_they_were() -> None:
    messages = [{"role": "assistant", "content": "x", "reasoning": "y", "name": None}]
    assert rendered("{{ messages[0] }}", messages) != str(messages[0])
    assert messages == [{"role": "assistant", "content": "x", "reasoning": "y", "name": None}]


def test_a_plain_jinja_environment_would_fail_this_suite() -> None:
    assert "class" in jinja2.Environment().from_string("{{ ''.__class__.__mro__ }}").render()


def test_tools_are_given_to_a_template_that_takes_them_and_refused_by_others() -> None:
    messages = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    taking = ChatTemplate("{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}")
    assert taking.render(messages, tools=tools) == "f x"
    assert taking.render(messages) == "x"
    with pytest.raises(ChatTemplateError, match="takes no tools: leave them out"):
        ChatTemplate("{{ messages[0].content }}").render(messages, tools=tools)
    with pytest.raises(ChatTemplateError, match=r"tools\[0\].* must be plain JSON data"):
        taking.render(messages, tools=[{"function": {"name": object()}}])
