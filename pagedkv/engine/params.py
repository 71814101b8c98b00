"""How the tokens of a request are chosen, with vLLM's names, meanings and defaults."""

import math
import operator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedkv import _core

_U64 = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a text ends.

    The random number of a token is a function of (seed, sample index, position) alone, so a sample does not change
    with its neighbours, with `n`, or with a restart. Of equal logits the lowest id comes first, everywhere.

    Attributes
    ----------
    n : int
        Samples of the prompt; each differs.
    temperature : float
        Divides the logits; 0 is greedy.
    top_p : float
        Choose among the fewest likeliest tokens (of those that `min_p` and `top_k` leave) whose probabilities reach
        this sum; in (0, 1].
    top_k : int
        Choose among this many likeliest tokens; 0 or -1 for all.
    min_p : float
        Leave out tokens less likely than this part of the likeliest one's probability; in [0, 1].
    presence_penalty, frequency_penalty : float
        Taken off the logit of every token generated before: once, and once each time; in [-2, 2].
    repetition_penalty : float
        Positive logits of tokens of the prompt and the text so far are divided by it, others multiplied; above 0.
    seed : int or None
        In [0, 2**64). None (or -1): the engine gives each request another one.
    stop : str or list of str
        Texts that end a sample. Looked for across the borders of tokens; the earliest one counts.
    stop_token_ids : list of int
        Tokens that end a sample, beside the model's own end tokens.
    ignore_eos : bool
        Go on after the model's end tokens.
    max_tokens : int or None
        Of one sample; None: as many as the context and the pool hold.
    min_tokens : int
        No end token, stop token or stop text before so many tokens.
    logprobs : int or None
        Log-probabilities of the chosen token and of so many likeliest ones at each place; -1 for all tokens. They are
        those of the model: before penalties, bias and temperature.
    prompt_logprobs : int or None
        The same for the prompt's tokens.
    detokenize : bool
        Make text of the tokens.
    skip_special_tokens : bool
        Leave control tokens out of the text.
    include_stop_str_in_output : bool
        Keep the text that ended a sample.
    logit_bias : dict of int to float
        Added to logits; values are cut to [-100, 100].

    Raises
    ------
    ValueError
        A value outside its range.
    TypeError
        A count that is no integer.

    Examples
    --------
    >>> import numpy as np, pagedkv as pk
    >>> logits = np.array([0.0, 2.0, 2.0, 1.0], np.float32)
    >>> pk.SamplingParams(temperature=0).choose(logits, sample=0, position=5)
    1
    >>> {pk.SamplingParams(top_k=2, seed=7).choose(logits, sample=i, position=5) for i in range(50)} == {1, 2}
    True
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None

    def __post_init__(self) -> None:
        def put(name, value):
            object.__setattr__(self, name, value)

        def need(holds, name, what):
            if not holds:
                raise ValueError(f"{name} must be {what}, not {getattr(self, name)!r}")

        put("top_k", 0 if self.top_k == -1 else operator.index(self.top_k))
        put("seed", None if self.seed == -1 else self.seed)
        put("stop", [self.stop] if isinstance(self.stop, str) else list(self.stop or ()))
        put("stop_token_ids", [operator.index(token_id) for token_id in self.stop_token_ids or ()])
        if self.logit_bias is not None:
            for token_id, bias in self.logit_bias.items():
                if not math.isfinite(bias):
                    raise ValueError(f"logit_bias must be finite, not {bias} for token {token_id}")
            put("logit_bias", {int(token_id): min(100.0, max(-100.0, float(bias)))
                               for token_id, bias in self.logit_bias.items()})

        need(operator.index(self.n) >= 1, "n", "at least 1")
        need(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "0 or a positive number")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(self.top_k >= 0, "top_k", "0 or -1 (all tokens) or positive")
        need(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        need(math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty",
             "a number above 0")
        need(self.seed is None or 0 <= operator.index(self.seed) < _U64, "seed", "in [0, 2**64) or None")
        need(all(isinstance(text, str) and text for text in self.stop), "stop", "a list of texts that are not empty")
        need(not self.stop or self.detokenize, "detokenize", "True where stop has texts")
        need(all(token_id >= 0 for token_id in self.stop_token_ids), "stop_token_ids", "ids from 0 on")
        need(self.max_tokens is None or operator.index(self.max_tokens) >= 1, "max_tokens", "at least 1 or None")
        need(operator.index(self.min_tokens) >= 0, "min_tokens", "0 or more")
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens",
             f"at most max_tokens, {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(value is None or operator.index(value) >= -1, name, "a count, -1 (all tokens) or None")

    def choose(self, logits: npt.NDArray[np.float32], sample: int, position: int) -> int:
        """The token that follows, by temperature, `min_p`, `top_k`, `top_p` and `seed` (0 where it is None).

        Penalties, bias and `min_tokens` need a text so far and are left to the engine.

        Parameters
        ----------
        logits : numpy.ndarray
            float32 ``[vocab_size]``. Minus infinity excludes a token.
        sample : int
            Index of this sample among those of one prompt; in [0, 2**64).
        position : int
            Index that the token will have in its sequence; in [0, 2**64).

        Returns
        -------
        int

        Raises
        ------
        ValueError
            `logits` is no such array, its largest value is not finite or it holds NaN; `sample` or `position`
            is outside its range.
        """
        logits = np.ascontiguousarray(logits, np.float32)
        if logits.ndim != 1 or not logits.size:
            raise ValueError(f"logits must have shape [vocab_size], not {list(logits.shape)}")
        for name, value in (("sample", sample), ("position", position)):
            if not 0 <= operator.index(value) < _U64:
                raise ValueError(f"{name} must be in [0, 2**64), not {value}")
        draw = np.array([self._draw(0, self.seed or 0, sample, position)], _core.DRAW)
        token = int(_core.sample(logits[None], draw)[0])
        if token < 0:
            raise ValueError(f"the largest logit is {logits.max()}")
        return token

    def _draw(self, row, seed, sample, position):
        """The fields of _core.DRAW."""
        # More likeliest tokens than int64 counts are all of them.
        return row, self.temperature, min(self.top_k, 2**63 - 1), self.top_p, self.min_p, seed, sample, position
