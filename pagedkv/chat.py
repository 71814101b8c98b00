"""Chat templates: a list of messages becomes the text that the model was trained on.

Templates are Jinja programs that come with model files, so they are untrusted: they run in a
sandbox that bounds what they take (:mod:`pagedkv.sandbox`) and see nothing but plain copies of
what the caller passes.
"""

from collections.abc import Mapping
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock

from pagedkv import sandbox
from pagedkv.errors import FormatError, PagedKVError

_MOST_MESSAGE_LEN = 500  # of an error that a template words


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
        environment = sandbox.Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = sandbox.compile_template(environment, source)
        except Exception as error:
            # Not TemplateError alone: Python's compiler has limits too, and says so in its own ways.
            raise FormatError(f"the chat template does not parse: {_words(error)}") from None

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
        try:
            messages = [_plain(message) for message in messages]
            variables = {name: _plain(value) for name, value in variables.items()}
        except RecursionError:
            raise TypeError("the messages are nested too deeply, or hold themselves") from None
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise TypeError(f'message {number} must be a dict with a str "role", not {message!r:.80}')
        variables |= {"messages": messages, "add_generation_prompt": bool(add_generation_prompt)}
        budget = sandbox.BASE_NBYTES + sandbox.PER_INPUT_NBYTE * sandbox.nbytes(variables)
        try:
            return sandbox.render(self._template, budget, variables)
        except _Refusal as refusal:
            raise ChatError(f"the chat template refuses these messages: {refusal}") from None
        except sandbox.TooMuch as error:
            raise ChatError(f"the chat template is stopped: {error}") from None
        except Exception as error:
            # Any Python error can come out of a template: "a" + None, a missing key, a division.
            raise ChatError(f"the chat template fails on these messages: {_words(error)}") from None


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
    raise _Refusal(str(message)[:_MOST_MESSAGE_LEN])


def _strftime_now(pattern):
    return datetime.now().strftime(pattern)


def _words(error):
    """Of an error: its class where that says something, and not the megabytes that it may quote."""
    name = "" if isinstance(error, jinja2.TemplateSyntaxError) else f"{type(error).__name__}: "
    return f"{name}{error}"[:_MOST_MESSAGE_LEN]


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
