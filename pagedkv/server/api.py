"""What clients send, in OpenAI's shapes with vLLM's extra fields, checked; and errors in OpenAI's shape."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from pagedkv.engine import SamplingParams
from pagedkv.errors import BoundsError, PagedKVError, PoolExhausted

MOST_LOGPROBS = 20  # a place; OpenAI's bound for chats
MOST_STOPS = 64  # each is looked for after each token


class ApiError(HTTPException):
    """A refusal that the client sees.

    Parameters
    ----------
    status : int
        Of HTTP.
    message : str
    param : str, optional
        The field at fault.
    code : str, optional
        OpenAI's word for it.
    headers : dict of str to str
    """

    def __init__(self, status, message, param=None, code=None, **headers):
        super().__init__(status, message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @classmethod
    def of(cls, error):
        """What a client is told of any exception: what was wrong with its request, or only that something failed."""
        if isinstance(error, cls):
            return error
        if isinstance(error, (PoolExhausted, BoundsError)):
            return cls(400, _sentence(error), code="context_length_exceeded")
        if isinstance(error, (PagedKVError, ValueError, TypeError)):
            message = _sentence(error)
            word = message.split(" ", 1)[0]
            return cls(400, message, word if word in SamplingParams.__dataclass_fields__ else None)
        return cls(500, "the server failed on this request; its log says where")

    def body(self):
        kind = ("server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429
                else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _sentence(error):
    return getattr(error, "message", None) or str(error)


class _Body(BaseModel):
    # A misspelt field would be lost without a word, so unknown ones are errors, as they are with OpenAI.
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against who listens to lengths; none is sent


class _Sampled(_Body):
    """Fields of completions and chats alike."""

    model: str
    n: int | None = 1
    max_tokens: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Any = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    # vLLM's
    top_k: int | None = 0
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0
    ignore_eos: bool = False
    min_tokens: int | None = 0
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    # Change no answer here.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def _sampling(self, **fields):
        """SamplingParams; what is null has its default."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", "stream_options")
        if not (self.stop is None or isinstance(self.stop, str)
                or (isinstance(self.stop, list) and all(isinstance(text, str) for text in self.stop))):  # fmt: skip
            raise ApiError(400, "stop must be a text or a list of texts", "stop")
        if isinstance(self.stop, list) and len(self.stop) > MOST_STOPS:
            raise ApiError(400, f"stop has {len(self.stop)} texts, at most {MOST_STOPS} are taken", "stop")
        for name in ("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p",
                     "repetition_penalty", "min_tokens", "stop", "stop_token_ids"):  # fmt: skip
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            fields[name] = getattr(self, name)
        if self.seed is not None:
            fields["seed"] = self.seed % 2**64  # OpenAI's is signed
        if self.logit_bias is not None:
            fields["logit_bias"] = {_bias_id(key): _bias(value) for key, value in self.logit_bias.items()}
        return SamplingParams(**fields)

    def _refuse(self, **usual):
        """End a request that asks for what there is not; fields that say so in vain are let pass."""
        for name, values in usual.items():
            if getattr(self, name) not in (None, *values):
                raise ApiError(400, f"{name} is not supported here", name, "unsupported_parameter")


def _bias_id(key):
    if not (key.isascii() and key.isdigit()):
        raise ApiError(400, "logit_bias has a key that is no token id", "logit_bias")
    return int(key)


def _bias(value):
    if not -100 <= value <= 100:
        raise ApiError(400, f"logit_bias must be in [-100, 100], not {value}", "logit_bias")
    return value


def _count_of_logprobs(name, n):
    if n is not None and not 0 <= n <= MOST_LOGPROBS:
        raise ApiError(400, f"{name} must be from 0 to {MOST_LOGPROBS}, not {n}", name)
    return n


class CompletionRequest(_Sampled):
    prompt: Any
    echo: bool | None = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def prompts(self):
        """A list of texts and lists of ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_id, prompt))):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ApiError(400, "prompt must be a text, a list of token ids, or a list of these that is not empty",
                           "prompt")  # fmt: skip
        for place, each in enumerate(prompt):
            if not (isinstance(each, str) or (isinstance(each, list) and all(map(_is_id, each)))):
                raise ApiError(400, f"prompt {place} of the list is neither a text nor a list of token ids", "prompt")
        return prompt

    def sampling(self):
        self._refuse(suffix=("",), best_of=(1, self.n))
        logprobs = _count_of_logprobs("logprobs", self.logprobs)
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        # No token at all is asked for to have the prompt's log-probabilities; the engine draws one, which is dropped.
        return self._sampling(max_tokens=1 if max_tokens == 0 else max_tokens, logprobs=logprobs,
                              prompt_logprobs=logprobs if self.echo else None)  # fmt: skip


def _is_id(value):
    return type(value) is int


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None

    def plain(self, place):
        """A dict for the template, whose content is one text."""
        where = f"messages.{place}"
        for name, value in (self.model_extra or {}).items():
            if value and name not in ("name", "refusal", "annotations"):
                raise ApiError(400, f"{where}: {name} is not supported here", f"{where}.{name}",
                               "unsupported_parameter")  # fmt: skip
        parts = [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content
        if not isinstance(parts, list) or not parts:
            raise ApiError(400, f"{where}.content must be a text or a list of text parts", f"{where}.content")
        for part in parts:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise ApiError(400, f"{where}.content has a part that is no text; only texts are supported here",
                               f"{where}.content")  # fmt: skip
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer word, which templates do not know
        return {"role": role, "content": "\n".join(part["text"] for part in parts)}


class ChatRequest(_Sampled):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    echo: ClassVar[bool] = False

    def conversation(self):
        return [message.plain(place) for place, message in enumerate(self.messages)]

    def variables(self):
        """Further names for the template."""
        variables = dict(self.chat_template_kwargs or {})
        if taken := {"messages", "tokenize", "add_generation_prompt"} & set(variables):
            raise ApiError(400, f"chat_template_kwargs cannot set {min(taken)}", "chat_template_kwargs")
        return variables | {"add_generation_prompt": self.add_generation_prompt}

    def sampling(self):
        self._refuse(response_format=({"type": "text"},), tools=([],), tool_choice=("none", "auto"), functions=([],),
                     function_call=("none", "auto"), modalities=(["text"],))  # fmt: skip
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        logprobs = _count_of_logprobs("top_logprobs", self.top_logprobs) or 0
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling(max_tokens=max_tokens, logprobs=logprobs if self.logprobs else None)


class TokenizeRequest(_Body):
    """vLLM's: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[int]
