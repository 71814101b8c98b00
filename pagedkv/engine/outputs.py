"""What comes back, with vLLM's names."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at one place.

    Attributes
    ----------
    logprob : float
        By the model's own logits, before penalties, bias and temperature.
    rank : int
        1 for the likeliest; of equal ones the lower id comes first.
    decoded_token : str or None
        Its text; None where the model has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample of a request.

    Attributes
    ----------
    index : int
        Of the sample, in ``[0, n)``.
    text : str
    token_ids : list of int
        An end token counts; its text does not show.
    cumulative_logprob : float or None
        Sum of the tokens' log-probabilities; None unless `logprobs` was asked for.
    logprobs : list of dict of int to Logprob, or None
        One dict a token: the token itself, then the likeliest ones.
    finish_reason : str or None
        ``"stop"``, ``"length"``, ``"abort"``, ``"error"``; None while it goes on.
    stop_reason : int, str or None
        The stop token or stop text that ended it; None for the model's own end tokens.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether no token follows."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and its samples.

    Attributes
    ----------
    request_id : str
    prompt : str or None
        None where it came as tokens.
    prompt_token_ids : list of int
    prompt_logprobs : list of (dict of int to Logprob or None), or None
        The first is None: nothing comes before it.
    outputs : list of CompletionOutput
    finished : bool
    num_cached_tokens : int
        Tokens of the prompt whose rows came from the prefix cache.
    error : Exception or None
        Why the request alone was ended, where it was refused or failed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    error: Exception | None = None
