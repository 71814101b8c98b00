"""What clients get: outputs of the engine as OpenAI's choices, whole or in events."""

import json
import time
import uuid

import pagedkv

LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's number
# Plain ASCII, so that a lone surrogate in a message is no error. One for all: to make one takes longer than to use it.
encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event(data):
    """A server-sent event."""
    return f"data: {encode(data)}\n\n"


class Answer:
    """One answer as it grows.

    Parameters
    ----------
    request : CompletionRequest or ChatRequest
    params : SamplingParams
    tokenizer : Tokenizer
    prompts : list of (str or None, list of int)
        Texts where they came as texts, and ids.
    """

    def __init__(self, request, params, tokenizer, prompts):
        self._request, self._params, self._tokenizer, self._prompts = request, params, tokenizer, prompts
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": request.model,
                      "system_fingerprint": f"pagedkv-{pagedkv.__version__}"}  # fmt: skip
        self._begun = set()  # indices of choices
        self._n_cached = [0] * len(prompts)
        self._n_generated = 0
        self._usage_in_events = bool(request.stream_options and request.stream_options.include_usage)
        # Of all events but the last the beginning and the end are the same.
        self._opening = f"data: {encode(self._head | {'object': self.chunk_kind})[:-1]},\"choices\":["
        self._closing = ('],"usage":null}' if self._usage_in_events else "]}") + "\n\n"

    @property
    def id(self):
        return self._head["id"]

    @property
    def n_prompt_tokens(self):
        return sum(len(ids) for _, ids in self._prompts)

    def pieces(self, place, output):
        """What an output of prompt `place` brings: a list of (index of the choice, text, logprobs, finish_reason)."""
        pieces = []
        self._n_cached[place] = output.num_cached_tokens
        for sample in output.outputs:
            if not sample.token_ids and sample.finish_reason is None:
                continue
            index = place * self._params.n + sample.index
            text, found = sample.text, list(zip(sample.token_ids, sample.logprobs or ()))
            self._n_generated += len(sample.token_ids)
            if self._request.max_tokens == 0:  # the engine's one token was not asked for
                self._n_generated -= len(sample.token_ids)
                text, found = "", []
                sample.finish_reason = "length"
            if self._request.echo and index not in self._begun:
                prompt, ids = self._prompts[place]
                text = (self._tokenizer.decode(ids) if prompt is None else prompt) + text
                if output.prompt_logprobs is not None:
                    found = list(zip(ids, output.prompt_logprobs)) + found
            self._begun.add(index)
            logprobs = None if sample.logprobs is None else self._logprobs(index, found)
            pieces.append((index, text, logprobs, sample.finish_reason))
        return pieces

    def usage(self):
        n_prompt = self.n_prompt_tokens
        return {"prompt_tokens": n_prompt, "completion_tokens": self._n_generated,
                "total_tokens": n_prompt + self._n_generated,
                "prompt_tokens_details": {"cached_tokens": sum(self._n_cached)}}  # fmt: skip

    def whole(self, pieces):
        """The answer that all pieces add up to."""
        texts, logprobs, reasons = {}, {}, {}
        for index, text, more, reason in pieces:
            texts[index] = texts.get(index, "") + text
            reasons[index] = reason
            if index not in logprobs or more is None:
                logprobs[index] = more
            else:
                for name, values in more.items():
                    if values:
                        logprobs[index][name] += values
        choices = [{"index": index, **self._choice(texts[index]), "logprobs": logprobs[index],
                    "finish_reason": reasons[index]} for index in sorted(texts)]  # fmt: skip
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def events(self, index, text, logprobs, reason):
        """One piece as events of a stream; none where text that is held back may follow."""
        return self._event(index, self._delta(text), logprobs, reason) if text or logprobs or reason else ""

    def last_event(self):
        """The usage, where it was asked for."""
        if not self._usage_in_events:
            return ""
        return event({**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage()})

    def _event(self, index, delta, logprobs=None, reason=None):
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": reason}
        return self._opening + encode(choice) + self._closing

    def _name(self, token, logprob):
        return f"token_id:{token}" if self._request.return_tokens_as_token_ids else logprob.decoded_token

    def _bytes(self, token, logprob):
        tokenizer = self._tokenizer
        return logprob.decoded_token.encode() if tokenizer._join is None else tokenizer._piece(token)


class CompletionAnswer(Answer):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args):
        super().__init__(*args)
        self._n_characters = {}  # index -> of its tokens so far

    def _choice(self, text):
        return {"text": text}

    _delta = _choice

    def _logprobs(self, index, found):
        lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        end = self._n_characters.get(index, 0)
        for token, logprobs in found:
            if logprobs is None:  # nothing comes before a prompt's first token
                text = self._tokenizer.decode([token])
                name = f"token_id:{token}" if self._request.return_tokens_as_token_ids else text
                value = top = None
            else:
                text, name = logprobs[token].decoded_token, self._text(token, logprobs[token])
                value = _finite(logprobs[token].logprob)
                top = {self._text(each, logprob): _finite(logprob.logprob) for each, logprob in logprobs.items()}
            for values, value in zip(lists.values(), (name, value, top, end)):
                values.append(value)
            end += len(text)
        self._n_characters[index] = end
        return lists

    def _text(self, token, logprob):
        """A key of top_logprobs: tokens that are no whole characters must not fall together."""
        if "\ufffd" in logprob.decoded_token and not self._request.return_tokens_as_token_ids:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes(token, logprob))
        return self._name(token, logprob)


class ChatAnswer(Answer):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args):
        super().__init__(*args)
        self._opened = set()  # indices of choices whose role was told

    def events(self, index, *piece):
        events = super().events(index, *piece)
        if events and index not in self._opened:
            self._opened.add(index)
            events = self._event(index, {"delta": {"role": "assistant", "content": ""}}) + events
        return events

    def _choice(self, text):
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text):
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, _, found):
        content = []
        for token, logprobs in found:
            likeliest = sorted(logprobs.items(), key=lambda each: each[1].rank)[: self._params.logprobs]
            content.append(self._entry(token, logprobs[token])
                           | {"top_logprobs": [self._entry(*each) for each in likeliest]})  # fmt: skip
        return {"content": content, "refusal": None}

    def _entry(self, token, logprob):
        return {"token": self._name(token, logprob), "logprob": _finite(logprob.logprob),
                "bytes": list(self._bytes(token, logprob))}  # fmt: skip


def _finite(logprob):
    return max(logprob, LEAST_LOGPROB)
