"""Chat templates: a list of messages becomes the text that the model was trained on.

Templates are Jinja programs that come with model files, so they are untrusted: they run in
Jinja's immutable sandbox and see nothing but plain copies of what the caller passes.
"""

import json
from collections.abc import Mapping
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedkv.errors import FormatError, PagedKVError


class ChatError(PagedKVError, ValueError):
    """The messages do not fit the template, or the model has none."""


class ChatTemplate:
    """A compiled chat template.

    The environment is the one that templates are written for (that of Hugging Face
    transformers): ``trim_blocks`` and ``lstrip_blocks`` are on, ``break`` and ``continue`` work,
    ``{% generation %}`` marks text and changes nothing, ``tojson`` escapes no HTML, and
    ``raise_exception`` and ``strftime_now`` exist.

    Parameters
    ----------
    source : str
        The Jinja text.

    Raises
    ------
    FormatError
        The text is no valid template.

    Examples
    --------
    >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    'user: Hi\\n'
    """

    def __init__(self, source):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise FormatError(f"the chat template does not parse: {error}") from None

    def render(self, messages, add_generation_prompt=False, **variables):
        """Write the conversation out.

        Parameters
        ----------
        messages : list of dict
            Each with ``"role"`` and what else the template reads, as a rule ``"content"``.
        add_generation_prompt : bool
            End with the opening of the assistant's turn.
        **variables
            Further names for the template: ``bos_token``, ``tools``, ``enable_thinking``, ...

        Returns
        -------
        str

        Raises
        ------
        ChatError
            The template refuses the messages, or fails on them.
        TypeError
            ``messages`` is not a list of dicts of plain data.
        """
        if isinstance(messages, (str, bytes, Mapping)):
            raise TypeError(f"messages must be a list of dicts, not {type(messages).__name__}")
        messages = [_plain(message) for message in messages]
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise TypeError(f'message {number} must be a dict with a str "role", not {message!r:.80}')
        variables = {name: _plain(value) for name, value in variables.items()}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=bool(add_generation_prompt), **variables
            )
        except _Refusal as refusal:
            raise ChatError(f"the chat template refuses these messages: {refusal}") from None
        except Exception as error:
            # Any Python error can come out of a template: "a" + None, a missing key, a division.
            raise ChatError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}"
            ) from None


class _Refusal(jinja2.TemplateError):
    """What a template throws through ``raise_exception``."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def _raise_exception(message):
    raise _Refusal(message)


def _strftime_now(pattern):
    return datetime.now().strftime(pattern)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter writes < and & as escapes, which a model would see.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain(value):
    """A deep copy in exact JSON types: an object's methods would be within the template's reach."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    # A subclass (an enum, say) may override str() itself; the base's own method cannot be.
    for base, copy in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, base):
            return copy(value)
    raise TypeError(f"a chat template takes str, numbers, lists and dicts, not {type(value).__name__}")
