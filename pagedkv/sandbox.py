"""Jinja for strangers' templates: no way out of the sandbox, and an end to what a template may cost.

Jinja's own sandbox hides attributes and refuses long ranges, but ``'x' * 10**10``, a macro that calls itself twice or a
width of 10**9 take what they like. Here everything is paid from one account of bytes. Loops, macros and blocks pay
for the nodes of their bodies each time they run; operators, filters, tests and calls pay for what they read and make,
before they make it where the result can be much larger than what it is made of. Nothing is measured in seconds and no
signal is used, so a template that is refused is refused on every machine and in every thread.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from functools import update_wrapper
from types import BuiltinMethodType

import jinja2
from jinja2 import nodes
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

# What one rendering may use, in bytes made or read: 2**27 are some two million nodes and a few seconds. To this come
# so many bytes for each byte of the messages, as a conversation may be long and a template looks at it more than once.
BASE_NBYTES, PER_INPUT_NBYTE = 1 << 27, 128
# A node of a template that runs, an element of a list: about what the objects take, and a microsecond.
_NODE_NBYTES = 64
# Larger numbers cannot be printed (Python's limit is 4,300 digits), only take time.
_MOST_BITS = 1 << 15
_MOST_WIDTH = 9999  # of a printf or format() field
# Templates in use take up to some 30 kB.
MOST_SOURCE_LEN = 1 << 17

_account = threading.local()


class TooMuch(jinja2.TemplateRuntimeError):
    """A template wants more than it may have."""


def render(template, budget, variables):
    """Render with an account of so many bytes; any exception may come of it.

    Parameters
    ----------
    template : jinja2.Template
        Of :func:`compile_template`.
    budget : int
    variables : dict
        Plain data, see :func:`nbytes`.
    """
    before, _account.left = getattr(_account, "left", None), budget
    try:
        return template.render(variables)
    finally:
        _account.left = before


def nbytes(value):
    """What plain data takes, each part as often as it is printed."""
    total, stack = 0, [value]

    def add(n):
        nonlocal total
        total += n

    _walk(stack, add)
    return total


def _spend(n):
    left = getattr(_account, "left", None)
    if left is None:  # Jinja folds constants when it compiles: not these
        raise nodes.Impossible()
    _account.left = left - n
    if left < n:
        raise TooMuch("it does or makes too much: the template loops, calls itself or grows its text without end")
    return True


def _walk(stack, spend):
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            spend(sys.getsizeof(value))
            continue
        spend(_NODE_NBYTES)
        if isinstance(value, dict):
            spend(_NODE_NBYTES * len(value))
            stack.extend(value.keys())
            stack.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)) or type(value) in _VIEWS:
            spend(_NODE_NBYTES * len(value))
            stack.extend(value)
        elif isinstance(value, range):
            spend(_NODE_NBYTES * len(value))


_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


def _pay(*values):
    """Pay for reading all of these, which may share parts: a list of itself twice, 40 times over, has 2**40."""
    for value in values:
        _walk([value], _spend)


def _paid(value):
    _pay(value)
    return value


def _made(value):
    """Pay for a new value, not for its parts."""
    if isinstance(value, str):
        _spend(sys.getsizeof(value))
    elif isinstance(value, (list, tuple, dict, set)):
        _spend(_NODE_NBYTES * (1 + len(value)))
    elif isinstance(value, int):
        _spend(_NODE_NBYTES)
        if value.bit_length() > _MOST_BITS:
            raise TooMuch(f"a number of {value.bit_length()} bits")
    elif isinstance(value, Iterator):
        # Now, while it can be paid for: an iterator may wait behind others.
        value = [item for item in value if _spend(_NODE_NBYTES)]
    return value


def _need_numbers(*values):
    for value in values:
        if not isinstance(value, (int, float)):
            raise TypeError(f"{type(value).__name__} where a number is needed")


# ---- Operators ----


def _binop(operator, left, right, compute):
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}.get(operator, 0)
            if bits > _MOST_BITS:
                raise TooMuch(f"a number of {bits} bits")
    elif operator == "*":
        n = max(0, next((value for value in (left, right) if isinstance(value, int)), 0))
        _spend(n * max(_shallow(left), _shallow(right)))
    elif operator == "%" and isinstance(left, str):
        _check_percent(left, right)
    elif operator == "+":
        escapes = 6 if isinstance(left, Markup) or isinstance(right, Markup) else 1
        _spend(escapes * (_shallow(left) + _shallow(right)))
    else:
        _pay(left, right)
    return _made(compute(left, right))


def _shallow(value):
    if isinstance(value, str):
        return sys.getsizeof(value)
    return _NODE_NBYTES * (1 + (len(value) if isinstance(value, (list, tuple, dict)) else 0))


def _check_percent(text, values):
    """Pay for ``text % values``; each conversion may print all of the values."""
    given = values if isinstance(values, tuple) else values.values() if isinstance(values, dict) else (values,)
    if re.search(r"\d{5}", text) or "*" in text and any(_is_wide(value) for value in given):
        raise TooMuch(f"a field is wider than {_MOST_WIDTH}")
    _spend_fields(text.count("%"), values)


def _check_format(text, values):
    """Pay for ``text.format(values)``."""
    if re.search(r"\d{5}", text) or re.search(r"\{[^{}]*:[^{}]*\{", text.replace("{{", "")):
        raise TooMuch(f"a field is wider than {_MOST_WIDTH}, or as wide as a value says")
    _spend_fields(text.count("{"), values)


def _spend_fields(n, values):
    # A character may become ten: "\U0010ffff".
    _spend(n * (_MOST_WIDTH + 10 * _paid_nbytes(values)))


def _paid_nbytes(value):
    before = _account.left
    _pay(value)
    return before - _account.left


def _is_wide(value):
    return isinstance(value, int) and abs(value) > _MOST_WIDTH


# ---- Methods ----

_BREAKS = [chr(c) for c in range(0x3001) if chr(c).isspace()]  # of words; those of lines are among them


def _spend_pieces(text, *args):
    counted = [arg for arg in args if isinstance(arg, str) and arg] or _BREAKS
    _spend(_NODE_NBYTES * (1 + sum(map(text.count, counted))))


def _spend_width(text, width, *_):
    if isinstance(width, int):
        _spend(4 * max(0, width))


def _spend_replaced(text, old, new, *_, **__):
    if isinstance(old, str) and isinstance(new, str):
        _spend((6 if isinstance(text, Markup) else 1) * (1 + text.count(old)) * sys.getsizeof(new))


def _spend_product(text, *args):
    # These compare each place with all of the argument, or may.
    _spend(len(text) // 16 * sum(len(arg) for arg in args if isinstance(arg, str)))


def _spend_joined(text, parts):
    _spend(len(parts) * _shallow(text) * (6 if isinstance(text, Markup) else 1))


# name -> what to pay before the call, beside what the string and the arguments take.
_STR_METHODS = (
    dict.fromkeys(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower"
        " isnumeric isprintable isspace istitle isupper lower partition removeprefix removesuffix startswith swapcase"
        " title upper".split()
    )
    | {
        "split": _spend_pieces,
        "splitlines": _spend_pieces,
        "replace": _spend_replaced,
        "join": _spend_joined,
        "center": _spend_width,
        "ljust": _spend_width,
        "rjust": _spend_width,
        "zfill": _spend_width,
    }
    | dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"), _spend_product)
)
_STR_METHODS["rsplit"] = lambda text, *args: (_spend_pieces(text, *args), _spend_product(text, *args))
# dict.get and its like read their arguments only, which are paid for; a list is read through.
_FREE_SELF = dict.fromkeys(("get", "items", "keys", "values"))
_METHODS = (
    (str, _STR_METHODS),
    (dict, _FREE_SELF | {"copy": None}),
    ((list, tuple), dict.fromkeys(("index", "count", "copy"))),
)
_OWN_CALLS = (Macro, BlockReference, LoopContext, Joiner, Undefined)


def _check_call(environment, called, args, kwargs):
    """Pay for a call, or refuse it."""
    if isinstance(called, _OWN_CALLS) or isinstance(getattr(called, "__self__", None), Extension):
        return _spend(_NODE_NBYTES * (1 + len(args) + len(kwargs)))
    given = [*args, *(value for name, value in kwargs.items() if not name.startswith("_"))]  # Jinja's own begin so
    _pay(*given)
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", None)
    of = getattr(called, "__wrapped__", None)  # str.format, as Jinja wraps it
    if type(of) is BuiltinMethodType and of.__name__ in ("format", "format_map") and isinstance(of.__self__, str):
        return _check_format(of.__self__, given)
    if any(called is each for each in environment.globals.values()) or isinstance(owner, (Cycler, LoopContext)):
        return _spend(_NODE_NBYTES)
    for kind, methods in _METHODS:
        if isinstance(owner, kind) and name in methods:
            if kwargs.keys() - {"sep", "maxsplit", "keepends", "count", "_loop_vars", "_block_vars"}:
                raise TypeError(f"{name}() takes no arguments by name here")
            if name not in _FREE_SELF:
                _pay(owner)
            if methods[name] is not None:
                methods[name](owner, *given)
            return True
    if callable(called):
        raise SecurityError(f"{name or type(called).__name__!r} is not for templates")
    return True  # Jinja says that it cannot be called


# ---- Filters and tests ----


def _before_join(value, d="", attribute=None):
    _spend((len(value) if hasattr(value, "__len__") else 0) * _shallow(d) * 6)


def _before_indent(text, width=4, *_, **__):
    width = _shallow(width) if isinstance(width, str) else 4 * width
    text = str(text)
    _spend((2 + sum(map(text.count, _BREAKS))) * max(0, width))


def _before_round(value, precision=0, *_, **__):
    _need_numbers(value, precision)
    if abs(precision) > 308:
        raise TooMuch(f"{precision} digits")


def _before_sum(value, attribute=None, start=0):
    _need_numbers(start)  # a sum of lists copies them again and again


def _before_sort(value, *_, **__):
    _spend(_NODE_NBYTES * len(value) * 16)


def _before_format(text, *args, **kwargs):
    _check_percent(str(text), args or kwargs)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """``json.dumps``: Jinja's own filter writes < and & as escapes, which a model would see."""
    marks = [indent, *separators] if isinstance(separators, (list, tuple)) else [indent]
    if any((len(mark) if isinstance(mark, str) else mark or 0) > 16 for mark in marks):
        raise TooMuch("tojson with an indent or a separator longer than 16")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return "".join([_made(part) for part in encoder.iterencode(value)])


# Beside what all but these pay, their arguments whole.
_BEFORE = {
    "join": _before_join,
    "indent": _before_indent,
    "round": _before_round,
    "sum": _before_sum,
    "sort": _before_sort,
    "dictsort": _before_sort,
    "groupby": _before_sort,
    "format": _before_format,
    "center": lambda text, width=80: _spend_width(text, width),
    "replace": lambda text, old, new, *_, **__: _spend_replaced(
        text if isinstance(text, str) else str(text), str(old), str(new)
    ),
    "trim": lambda text, chars=None: _spend_product(str(text), chars),
    "odd": _need_numbers,
    "even": _need_numbers,
    "divisibleby": lambda value, num: _need_numbers(value, num),
}
# They look at one object, or at each element of a list but not into it.
_SHALLOW = {
    "length",
    "count",
    "first",
    "last",
    "default",
    "d",
    "items",
    "attr",
    "list",
    "reverse",
    "map",
    "select",
    "selectattr",
    "reject",
    "rejectattr",
    "tojson",
}
_FREE_TESTS = {
    "defined",
    "undefined",
    "none",
    "boolean",
    "true",
    "false",
    "string",
    "mapping",
    "number",
    "integer",
    "float",
    "sequence",
    "iterable",
    "callable",
    "sameas",
    "escaped",
    "filter",
    "test",
}
# Of no use to a chat template; most of them, unbounded or random.
_LEFT_OUT = {
    "batch",
    "slice",
    "filesizeformat",
    "forceescape",
    "pprint",
    "random",
    "striptags",
    "urlencode",
    "urlize",
    "wordwrap",
    "xmlattr",
}
# Where a filter's attribute is among its arguments; "a.b.c" takes a step for each dot.
_ATTRIBUTE_AT = {
    "selectattr": 1,
    "rejectattr": 1,
    "groupby": 1,
    "sort": 3,
    "unique": 2,
    "min": 2,
    "max": 2,
    "sum": 1,
    "join": 2,
}


def _metered(name, function, is_free):
    n_own = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja puts its context or environment first

    def call(*args, **kwargs):
        given = args[n_own:]
        _spend(_NODE_NBYTES)
        if is_free:
            value = given[0] if given else None
            if name in ("list", "map", "select", "selectattr", "reject", "rejectattr") and hasattr(value, "__len__"):
                _spend(_NODE_NBYTES * len(value))
            _pay(*given[1:], *kwargs.values())
            if name == "tojson":
                _pay(value)
        else:
            _pay(*given, *kwargs.values())
        at = _ATTRIBUTE_AT.get(name, len(given))
        attribute = kwargs.get("attribute", given[at] if at < len(given) else None)
        if isinstance(attribute, str) and len(attribute) > 256:
            raise TooMuch(f"an attribute's name of {len(attribute)} characters")
        if name in _BEFORE:
            _BEFORE[name](*given, **kwargs)
        return _made(function(*args, **kwargs))

    return update_wrapper(call, function) if hasattr(function, "__dict__") else call


_PAID, _MADE = " paid", " made"  # of filters that no template can name


class _PayForAll(NodeTransformer):
    """Put a payment wherever Jinja's own hooks do not reach."""

    def _body(self, node):
        cost = _NODE_NBYTES * sum(1 for _ in node.find_all(nodes.Node))
        cost += sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node = self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute(f"spend({cost})"), lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:  # runs for elements that never reach the body
            cost = _NODE_NBYTES * (1 + sum(1 for _ in node.test.find_all(nodes.Node)))
            node.test = nodes.And(nodes.EnvironmentAttribute(f"spend({cost})"), node.test, lineno=node.lineno)
        return node

    visit_Template = visit_For = visit_Macro = visit_CallBlock = visit_Block = _body

    def _of(self, name, node):
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_Output(self, node):
        node = self.generic_visit(node)
        node.nodes = [each if isinstance(each, nodes.TemplateData) else self._of(_PAID, each) for each in node.nodes]
        return node

    def visit_Concat(self, node):
        node = self.generic_visit(node)
        node.nodes = [self._of(_PAID, each) for each in node.nodes]
        return self._of(_MADE, node)

    def visit_Compare(self, node):
        node = self.generic_visit(node)
        node.expr = self._of(_PAID, node.expr)
        for operand in node.ops:
            operand.expr = self._of(_PAID, operand.expr)
        return node

    def visit_Pair(self, node):
        node = self.generic_visit(node)
        node.key = self._of(_PAID, node.key)
        return node

    def visit_Getitem(self, node):
        node = self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return self._of(_MADE, node)
        node.arg = self._of(_PAID, node.arg)
        return node


class _Namespace(Namespace):
    def __repr__(self):
        return "<Namespace>"  # its parts are not paid for


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, in which everything has its price; for :func:`compile_template`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))
    spend = staticmethod(_spend)

    def __init__(self, **options):
        super().__init__(optimized=False, **options)
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        filters = {name: each for name, each in DEFAULT_FILTERS.items() if name not in _LEFT_OUT} | {"tojson": _tojson}
        self.filters = {name: _metered(name, each, name in _SHALLOW) for name, each in filters.items()}
        self.filters |= {_PAID: _paid, _MADE: _made}
        self.tests = {name: _metered(name, each, name in _FREE_TESTS) for name, each in DEFAULT_TESTS.items()}

    def call_binop(self, context, operator, left, right):
        return _binop(operator, left, right, self.binop_table[operator])

    def call(self, context, called, /, *args, **kwargs):
        _check_call(self, called, args, kwargs)
        return _made(super().call(context, called, *args, **kwargs))

    def unsafe_undefined(self, obj, attribute):
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")


def compile_template(environment, source):
    """A template for :func:`render`; any exception may come of a bad one.

    Parameters
    ----------
    environment : Environment
    source : str
    """
    if len(source) > MOST_SOURCE_LEN:
        raise TooMuch(f"it has {len(source)} characters, at most {MOST_SOURCE_LEN} are read")
    tree = _PayForAll().visit(environment.parse(source))
    return jinja2.Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
