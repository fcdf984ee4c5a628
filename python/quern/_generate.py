"""Generation: what Model.generate and Model.generate_batch run."""

from __future__ import annotations

import codecs
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from . import _abi_model, _errors, _library, _sampler
from ._sampler import Sampler, Sampling

# Tokens of a page of the cache, as in examples/generate.
_PAGE = 32


class _Request:
    """Prompts that were checked, and a state for what follows them."""

    def __init__(self, model, prompts, max_tokens, sampling, specials, cache_dtype, executor):
        self.model, self.words, self.sampling = model, model.tokenizer, sampling
        self.max_tokens = _library.whole("max_tokens", max_tokens)
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}; need 1 or more")
        _sampler.to_c(sampling)
        self.executor = model.executor_of(executor)
        _library.handle_of(self.executor, model.library)
        self.prompts = [_tokens_of(model, prompt, specials) for prompt in prompts]
        pages = sum(
            -(-min(len(prompt) + self.max_tokens, model.context) // _PAGE) for prompt in self.prompts
        )
        self.state = model.state(
            len(prompts),
            max_step_tokens=max(min(max(map(len, self.prompts), default=0), model.step_tokens), len(prompts)),
            cache_tokens=pages * _PAGE,
            page_size=_PAGE,
            cache_dtype=cache_dtype,
        )
        self.sampler = Sampler(model.vocab, library=model.library)
        self.sequences = [self.state.begin() for _ in self.prompts]

    def _rows(self, indices) -> List[Any]:
        base = self.sampling
        return [
            _sampler.to_c(base._replace(seed=(base.seed + i) % 2**64, step=self.state.length(self.sequences[i])))
            for i in indices
        ]

    def _choose(self, logits, indices) -> List[int]:
        tokens = self.sampler.sample_c(logits, self._rows(indices), self.executor)
        if _abi_model.NO_TOKEN in tokens:
            raise _errors.DataLossError("the model gave no usable probabilities; its weights are damaged")
        return list(tokens)

    def _forward(self, items) -> Any:
        return self.state.forward_c(items, False, self.executor)

    def run(self) -> Iterator[Tuple[int, Optional[int], Optional[str]]]:
        """(text, token, what ends the text after it or None); token is None where it ends the text itself."""
        last: Dict[int, int] = {}
        made = [0] * len(self.prompts)

        def chosen(i, token):
            made[i] += 1
            stop = None
            if self.words.is_end(token):
                token, stop = None, "end"
            elif made[i] == self.max_tokens:
                stop = "max_tokens"
            elif len(self.prompts[i]) + made[i] > self.model.context:
                stop = "context"
            if stop is None:
                last[i] = token
            else:
                last.pop(i, None)
                self.state.end(self.sequences[i])
            return i, token, stop

        step = self.model.step_tokens
        for i, prompt in enumerate(self.prompts):
            for at in range(0, len(prompt), step):
                logits = self._forward([(self.sequences[i], prompt[at : at + step])])
            (token,) = self._choose(logits, [i])
            yield chosen(i, token)
        while last:
            texts = list(last)
            logits = self._forward([(self.sequences[i], [last[i]]) for i in texts])
            for i, token in zip(texts, self._choose(logits, texts)):
                yield chosen(i, token)


def _tokens_of(model, prompt, specials) -> List[int]:
    if isinstance(prompt, (str, bytes)):
        words = model.tokenizer
        if words.vocab > model.vocab:
            raise _errors.InvalidArgumentError(
                f"the model's tokenizer has {words.vocab} tokens; its embedding has {model.vocab}"
            )
        tokens = words.encode(prompt, specials=specials)
    else:
        tokens = list(prompt)
    if not tokens:
        raise ValueError("the prompt has no tokens; need one or more")
    for token in tokens:
        if not 0 <= _library.whole("token", token) < model.vocab:
            raise ValueError(f"the prompt has token {token}; need 0 to {model.vocab - 1}")
    if len(tokens) > model.context:
        raise ValueError(f"the prompt has {len(tokens)} tokens; the model's context holds {model.context}")
    return tokens


class _Text:
    """Tokens to text that is always valid: bytes of an incomplete character are held back."""

    def __init__(self, words):
        self._words = words
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._words.decode_bytes([token], continues=True))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class Generation:
    """The text that follows a prompt: an iterator over its pieces, as soon as they are there.

    tokens: those of the text so far. stopped_by: None while it goes on; then "end", a token of the model
    that ends a text; "max_tokens"; or "context", which is full. close() ends it early.
    """

    def __init__(self, request: _Request):
        self.tokens: List[int] = []
        self.stopped_by: Optional[str] = None
        self._pieces = self._run(request)

    def _run(self, request) -> Iterator[str]:
        text = _Text(request.words)
        for _, token, stop in request.run():
            piece = ""
            if token is not None:
                self.tokens.append(token)
                piece = text.add(token)
            if stop is not None:
                self.stopped_by = stop
                piece += text.finish()
            if piece:
                yield piece

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def text(self) -> str:
        """What is left of the text, as one."""
        return "".join(self)

    def close(self) -> None:
        """Ends the text, and frees its state."""
        self._pieces.close()


def start(model, prompt, max_tokens, sampling: Sampling, specials, cache_dtype, executor) -> Generation:
    """Checks the arguments of Model.generate."""
    return Generation(_Request(model, [prompt], max_tokens, sampling, specials, cache_dtype, executor))


def batch(model, prompts: Sequence[Any], max_tokens, sampling, specials, cache_dtype, executor) -> List[str]:
    """Runs Model.generate_batch."""
    if isinstance(prompts, (str, bytes)):
        raise TypeError(f"prompts is of type {type(prompts).__name__}; need a list of prompts")
    if not prompts:
        return []
    request = _Request(model, prompts, max_tokens, sampling, specials, cache_dtype, executor)
    texts = [_Text(request.words) for _ in prompts]
    pieces: List[List[str]] = [[] for _ in prompts]
    for i, token, _ in request.run():
        if token is not None:
            pieces[i].append(texts[i].add(token))
    return ["".join(listed) + text.finish() for listed, text in zip(pieces, texts)]
