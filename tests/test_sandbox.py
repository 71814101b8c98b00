"""Chat templates that want too much: refused, in any thread, within bounds; and honest ones: as Jinja renders them."""

import json
import subprocess
import sys

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from promise_rows import child_env

from pagedkv import sandbox
from pagedkv.chat import ChatError, ChatTemplate
from pagedkv.errors import FormatError

MESSAGES = [{"role": "user", "content": "Hi"}]


def doubling(start, step, end):
    """A value that refers to itself twice, 99 times over."""
    return (
        "{% set ns = namespace(x="
        + start
        + ", y="
        + start
        + ") %}{% for i in range(99) %}{% set ns.x = "
        + step
        + " %}{% set ns.y = "
        + step.replace("ns.x", "ns.y")
        + " %}{% endfor %}"
        + end
    )


PAIRS = "[1]", "[ns.x, ns.x]"
TUPLES = "(1,)", "(ns.x, ns.x)"
# What each of these takes without a bound: hours, or gigabytes.
ENDLESS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if a is odd and false %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ loop.index }}{% continue %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [1] * 10**10 }}",
    doubling("'x'", "ns.x + ns.x", ""),
    doubling("'x'", "ns.x ~ ns.x", ""),
    doubling("'x'", "ns.x * 2", ""),
    doubling("'x'", "'%s%s' % (ns.x, ns.x)", ""),
    doubling("'x'", "'{}{}'.format(ns.x, ns.x)", ""),
    doubling("'x'", "[ns.x, ns.x] | join", ""),
    doubling("[1]", "ns.x + ns.x", ""),
    (
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x"
        " = y %}{% endfor %}"
    ),
    doubling(*PAIRS, "{{ ns.x }}"),
    doubling(*PAIRS, "{{ ns.x ~ '' }}"),
    doubling(*PAIRS, "{{ ns.x | tojson }}"),
    doubling(*PAIRS, "{{ ns.x | string }}"),
    doubling(*PAIRS, "{{ '%s' % ns.x }}"),
    doubling(*PAIRS, "{{ ns.x == ns.y }}"),
    doubling(*PAIRS, "{{ ns.x is eq ns.y }}"),
    doubling(*PAIRS, "{{ [ns.x] | select('eq', ns.y) | list }}"),
    doubling(*PAIRS, "{{ ns.x in [ns.y] }}"),
    doubling(*PAIRS, "{{ [ns.x].index(ns.y) }}"),
    doubling(*PAIRS, "{{ [ns.x, ns.y] | sort }}"),
    doubling(*PAIRS, "{{ dict(a=ns.x).values() }}"),
    doubling(*PAIRS, "{{ raise_exception(ns.x) }}"),
    doubling(*TUPLES, "{{ {ns.x: 1} }}"),
    doubling(*TUPLES, "{{ messages[0][ns.x] }}"),
    doubling(*TUPLES, "{{ messages[0].get(ns.x) }}"),
    doubling(*TUPLES, "{{ [ns.x] | unique | list }}"),
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ varargs | length }}{% endmacro %}{% for i in range(99999) %}{{ m(*range(99999)) }}{% endfor %}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{{ 2 ** 10000000000 }}",
    "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.rjust(10**10) }}",
    "{{ '1'.zfill(10**10) }}",
    "{{ 'x\\ny' | indent(10**10) }}",
    "{{ ('x\\n' * 10**5) | indent(10**5) }}",
    "{{ ('x' * 10**5) | replace('x', 'y' * 10**5) }}",
    "{{ ('x' * 10**5).replace('', 'y' * 10**5) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%.10000000000f' | format(1.0) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**10) }}",
    "{{ ('%s' * 10**5) % (('x' * 10**5,) * 10**5) }}",
    "{{ ('%(a)s' * 10**5) % {'a': 'x' * 10**5} }}",
    "{{ ('{0}' * 10**5).format('x' * 10**5) }}",
    "{{ ('{a}' * 10**5).format_map({'a': 'x' * 10**5}) }}",
    "{{ '%10000000000d' is odd }}",
    "{{ '%10000000000d' is divisibleby(3) }}",
    "{{ ('x' * 10**5).join('y' * 10**5) }}",
    "{{ range(99999) | join('x' * 10**5) }}",
    "{{ 1.5 | round(10**9, 'ceil') }}",
    "{{ 'x' | round(9, 'ceil') }}",
    "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "{{ lipsum(n=10**9) }}",
    "{{ ('\u1234\u1235' * 10**7) | list }}",
    "{{ ('\u1234 ' * 10**6).split() }}",
    "{{ ('\u1234,' * 10**6).split(maxsplit=10**6, sep=',') }}",
    "{{ ('\u1234\\n' * 10**6).splitlines() }}",
    "{% for i in range(99999) %}{{ ('a' * 10**6).rfind('b' + 'a' * 10**5) }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | min }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | reject | list }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | map('string') | first }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | sort | first }}{% endfor %}",
    "{{ ['0'] | map(attribute='0' + '.0' * 10**5) | list }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ messages | tojson(separators=('x' * 10**6, 'y' * 10**6)) }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
]
FORBIDDEN = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self.__dict__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages[0]['pop']('role') }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ 'x'.translate({120: 'y' * 10**5}) }}",
    "{{ 'x'.encode() }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{{ messages[0]() }}",
]
UNREADABLE = [
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{{ " + "-" * 50000 + "1 }}",
    "{{ 1" + "+1" * 6000 + " }}",
    "{{ a" + ".a" * 6000 + " }}",
    "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "{% if a %}" * 2000 + "{% endif %}" * 2000,
    "{{ " + "9" * 5000 + " }}",
    "x" * 200000,
    "{{ '\\x' }}",
    "{{ \ud800 }}",
    "{% macro a() %}" * 300 + "{% endmacro %}" * 300,
    "{{ 1 if }}",
    "{{ 1 | nosuch }}",
    "{{ 1 | urlize }}",
]

# Address space is limited, so that a value which nothing bounds is a MemoryError; and twice, the second time in a thread.
CHILD = """
import json, resource, sys, threading
from pagedkv import sandbox
from pagedkv.chat import ChatError, ChatTemplate
from pagedkv.errors import FormatError
sources, base, spare = json.load(sys.stdin)
sandbox.BASE_NBYTES = base or sandbox.BASE_NBYTES
vm = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
out = []
def render(sources):
    for source in sources:
        try:
            out.append("rendered: " + ChatTemplate(source).render([{"role": "user", "content": "Hi"}])[:50])
        except (ChatError, FormatError) as error:
            out.append(type(error).__name__ + ": " + str(error))
resource.setrlimit(resource.RLIMIT_AS, (vm + (spare << 20),) * 2)
render(sources[::2])
thread = threading.Thread(target=render, args=(sources[1::2],))
thread.start()
thread.join()
print(json.dumps(out))
"""


def outcomes(sources, base, spare):
    """What comes of each source, every other one in a thread; `spare` MiB of memory for it."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([sources, base, spare]),
        text=True,
        capture_output=True,
        timeout=600,
        env=child_env(),
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert len(out) == len(sources)
    n = (len(sources) + 1) // 2
    return {sources[i]: out[i // 2 + n * (i % 2)] for i in range(len(sources))}


needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/status")


def check_stopped(found):
    for source, outcome in found.items():
        assert outcome.startswith("ChatError: the chat template ") and len(outcome) < 700, (source, outcome)
        assert "MemoryError" not in outcome, source


@needs_proc
def test_templates_without_end_are_stopped():
    # With a sixteenth of the usual budget, for the time's sake.
    check_stopped(outcomes(ENDLESS, sandbox.BASE_NBYTES // 16, 256))


@needs_proc
@pytest.mark.slow
def test_templates_without_end_are_stopped_by_the_usual_budget():
    check_stopped(outcomes(ENDLESS, None, 1536))


def test_a_budget_is_one_threads_own():
    template = ChatTemplate("{{ raise_exception('a') }}")
    with pytest.raises(ChatError):
        template.render(MESSAGES)
    assert getattr(sandbox._account, "left", None) is None


@pytest.mark.parametrize("source", FORBIDDEN)
def test_no_way_out(source):
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(ChatError, match="fails on these messages: (SecurityError|TypeError)"):
        ChatTemplate(source).render(messages)
    assert messages == MESSAGES


@pytest.mark.parametrize("source", UNREADABLE, ids=range(len(UNREADABLE)))
def test_templates_that_do_not_compile(source):
    with pytest.raises(FormatError, match="does not parse") as caught:
        ChatTemplate(source)
    assert len(str(caught.value)) < 600


def test_the_budget_grows_with_the_messages():
    source = (
        "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content | trim | replace('a', 'bc') }}{%"
        " endfor %}"
    )
    long = [{"role": "user", "content": "a" * 20_000}] * 500
    assert len(ChatTemplate(source).render(long)) == 2 * 500 * 20_000


def test_messages_nested_too_deeply():
    deep = []
    for _ in range(5000):
        deep = [deep]
    round_trip = {"role": "user"}
    round_trip["self"] = round_trip
    for message in ({"role": "user", "content": deep}, round_trip):
        with pytest.raises(TypeError, match="nested too deeply, or hold themselves"):
            ChatTemplate("{{ messages }}").render([message])


# ---- Honest templates ----

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"a": {"type": "integer"}, "b": [1, 2.5, None, True, "<&é>"]}},
    }
]
CONVERSATION = [
    {"role": "system", "content": "Be <b>brief</b>.\n\nAnd & kind."},
    {"role": "user", "content": " What is 2 + 2? "},
    {
        "role": "assistant",
        "content": "<think>Easy.\n</think>\n\n4",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "user", "content": [{"type": "text", "text": "And then?"}, {"type": "image"}]},
]
HONEST = [
    (
        "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '\\n' }}{{ m.content }}<|end|>\n{% endfor"
        " %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
    ),
    (
        "{%- if messages[0]['role'] == 'system' %}{%- set rest = messages[1:] %}{{ messages[0].content | trim }}{%-"
        " else %}{%- set rest = messages %}{%- endif %}{%- for m in rest %}{%- if (m.role == 'user') != (loop.index0 %"
        " 2 == 0) and m.role != 'tool' %}!{%- endif %}{{ loop.index }}{{ loop.last }}{%- endfor %}"
    ),
    (
        "{% set ns = namespace(last=-1, n=messages | length - 1) %}{% for m in messages[::-1] %}{% set i = (messages |"
        " length - 1) - loop.index0 %}{% if ns.last < 0 and m.role == 'user' and m.content is string and not"
        " (m.content.startswith('<') and m.content.endswith('>')) %}{% set ns.last = i %}{% endif %}{% endfor %}{{"
        " ns.last }}"
    ),
    (
        "{% for m in messages %}{% if m.content is string and '</think>' in m.content %}{{"
        " m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}|{{"
        " m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}{% endfor %}"
    ),
    (
        "{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=4) }}{{ t.function.parameters.items() | list }}{%"
        " for k, v in t.function.parameters | dictsort %}{{ k }}={{ v }},{% endfor %}{% endfor %}"
    ),
    (
        "{% macro show(part, n=2) -%}{{ part.text if part is mapping and part.text is defined else part | string }}x{{"
        " n }}{{ caller() if caller else '' }}{%- endmacro %}{% for m in messages %}{% if m.content is iterable and"
        " m.content is not string %}{% for p in m.content %}{{ show(p, n=loop.index) }}{% endfor %}{% else %}{% call"
        " show(m.content) %}c{% endcall %}{% endif %}{% endfor %}"
    ),
    (
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', 'in',"
        " ['user', 'tool']) | map(attribute='role') | join(', ') }}{{ messages | map(attribute='role') | unique | sort"
        " | join('/') }}{{ (messages | last).role }}{{ messages | map(attribute='role') | first }}"
    ),
    (
        "{{ '%s has %d of %.2f%%' % ('x', 3, 4.5) }}{{ '{:>5}|{:,}'.format('ab', 12345) }}{{ 'a-b' | replace('-', '+')"
        " | upper }}{{ ['b', 'a'] | sort(reverse=true) }}{{ 'x\\ny\\n\\nz' | indent(2) }}{{ 'x\\ny' | indent('> ',"
        " true) }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ 7 / 2 }}{{ -3 | abs }}{{ 2.567 | round(1) }}"
    ),
    (
        "{{ tool_choice | default('auto') }}{{ none | default('x', true) }}{{ {'a': {'b': [1, 2]}}.a.b[-1] }}{{"
        " dict(a=1, b=2) }}{{ [1, 2] + [3] }}{{ (1, 2) ~ 'x' ~ 3 }}{{ 'ab' * 3 }}"
    ),
    (
        "{% set x %}a{{ 1 }}b{% endset %}{{ x }}{% filter upper %}q{{ x }}{% endfilter %}{% with a=1, b=2 %}{{ a + b"
        " }}{% endwith %}{{ range(3) | list }}{{ range(3) | sum }}{% for a in [[1, [2, [3]]]] recursive %}{{ a if a is"
        " number else loop(a) }}{% endfor %}{% for x in range(9) if x is even %}{{ x }}{% if x > 4 %}{% break %}{%"
        " endif %}{% else %}none{% endfor %}"
    ),
    (
        "{{ '<b>' | e }}{{ ('<b>' | safe) + '<i>' }}{{ 'Hi There' | lower | title | capitalize }}{{ ' a ' | trim |"
        " length }}{{ '3' | int + 1 }}{{ '2.5' | float }}{{ 'abc'[::-1] }}{{ 'abc' | reverse }}"
    ),
    (
        "{% set cycle = cycler('a', 'b') %}{% set comma = joiner(', ') %}{% for m in messages %}{{ comma() }}{{"
        " cycle.next() }}{{ loop.cycle('x', 'y') }}{{ loop.changed(m.role) }}{{ loop.previtem.role if loop.previtem"
        " }}{% endfor %}"
    ),
    (
        "{{ messages[2].tool_calls[0].function.arguments.get('a') }}{{ messages[2].get('nothing', 'd') }}{{ 'role' in"
        " messages[0] }}{{ messages[0].keys() | list }}{{ undefined_name }}{{ messages[9].x is defined }}"
    ),
]


@pytest.mark.parametrize("source", HONEST, ids=range(len(HONEST)))
def test_honest_templates_render_as_jinja_renders_them(source):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    variables = {"tools": TOOLS, "bos_token": "<s>"}
    try:
        expected = plain.from_string(source).render(messages=CONVERSATION, add_generation_prompt=True, **variables)
    except jinja2.UndefinedError as error:
        with pytest.raises(ChatError, match=str(error)):
            ChatTemplate(source).render(CONVERSATION, True, **variables)
    else:
        assert ChatTemplate(source).render(CONVERSATION, True, **variables) == expected
