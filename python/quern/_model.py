"""Model and ModelState: a language model of a GGUF file, and sequences in progress."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi, _abi_model, _errors, _generate, _library, _tensor, _tokenizer
from ._generate import Generation
from ._library import Executor, Library, Object
from ._sampler import Sampling
from ._tokenizer import Tokenizer


class Model(Object):
    """A language model of a GGUF file; models/README.md says which files are read.

    source: the path of a file, or the bytes of one. weights: the form in which matrices are kept: "file" (as
    in the file; "as_in_file" is its older name), "bf16", "f32" or "int8". activations: what matrices in
    blocks multiply: rows that become "int8", or "exact" ones, which is slower; None: "int8" with weights as
    in the file, else "exact". The defaults are those of examples/generate. max_context bounds the length of
    a sequence; 0: 32768. max_bytes bounds the memory of loading; 0: 256 MiB and 47 times the file.
    packed_path: a file of packed matrices, which is read if it exists and written if it does not.
    progress(done, total) is called while the weights are read; what it raises ends the loading, and so does
    KeyboardInterrupt. executor: threads of loading and, unless another is given, of generating; None: a pool
    of a thread on each core, which goes with the model.

    Threads may share a model: each call of generate has a state of its own.
    """

    def __init__(
        self,
        source: Union[str, os.PathLike, Any],
        *,
        weights: str = "file",
        activations: Optional[str] = None,
        max_context: int = 0,
        max_bytes: int = 0,
        packed_path: Union[None, str, os.PathLike] = None,
        progress: Optional[Callable[[int, int], Any]] = None,
        executor: Optional[Executor] = None,
        library: Optional[Library] = None,
    ):
        if library is None:
            library = executor.library if isinstance(executor, Executor) else _library.library()
        self._has_own = executor is None
        if executor is None:
            executor = library.executor()
        raised: list = []
        options = _abi_model.ModelOptions(
            size=ctypes.sizeof(_abi_model.ModelOptions),
            weights=_library.text("weights", weights),
            activations=_library.text("activations", activations),
            max_context=_library.whole("max_context", max_context),
            max_bytes=_library.whole("max_bytes", max_bytes),
            packed_path=_tokenizer.path_of("packed_path", packed_path),
            progress=_progress(progress, raised),
            cancelled=_cancelled(raised),
        )
        create = library._c.quern_model_create
        threads = _library.handle_of(executor, library)
        try:
            handle = _tokenizer.create(library, create, options, source, threads)
        except _errors.CancelledError:
            raise raised[0] from None
        super().__init__(library, handle)
        if raised:
            raise raised[0]
        self._executor = executor
        info = _abi_model.ModelInfo(size=ctypes.sizeof(_abi_model.ModelInfo))
        _errors.check(library._c, library._c.quern_model_get_info(self._handle, ctypes.byref(info)), self._handle)
        #: Length of the longest sequence; tokens are 0 <= token < vocab.
        self.context, self.vocab = info.context, info.vocab
        self.hidden, self.layers, self.weight_bytes = info.hidden, info.layers, info.weight_bytes
        #: Tokens of a prompt that a step should read on this machine at most.
        self.step_tokens = info.step_tokens
        self._words: Union[Tokenizer, _errors.Error]
        try:
            self._words = Tokenizer(source, library=library)
        except (_errors.UnimplementedError, _errors.InvalidArgumentError) as refused:
            # A model without a vocabulary serves those who have tokens.
            self._words = refused

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file; raises what is wrong with its vocabulary."""
        if not isinstance(self._words, Tokenizer):
            raise type(self._words)(str(self._words))
        return self._words

    def state(
        self,
        max_sequences: int = 1,
        *,
        max_step_tokens: int = 0,
        cache_tokens: int = 0,
        page_size: int = 0,
        cache_dtype: Optional[str] = None,
        max_bytes: int = 0,
    ) -> ModelState:
        """A state for several sequences, with a cache of its own.

        max_step_tokens: in one forward, over all sequences; 0: 512. cache_tokens: over all sequences; 0:
        max_sequences times the context. page_size: 0: 32. cache_dtype: "f32", "bf16", "f16", "i8",
        "f8e4m3" or "f8e5m2"; None: "bf16". max_bytes of cache and activations; 0: 4 GiB and 64 times the weights.
        """
        return ModelState(self, max_sequences, max_step_tokens, cache_tokens, page_size, cache_dtype, max_bytes)

    def generate(
        self,
        prompt: Union[str, bytes, Sequence[int]],
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 1.0,
        seed: int = 4,
        min_p: float = 0.0,
        top_n_sigma: float = 0.0,
        typical_p: float = 1.0,
        specials: bool = False,
        cache_dtype: Optional[str] = None,
        executor: Optional[Executor] = None,
    ) -> Generation:
        """The text that follows a prompt, piece by piece: for piece in model.generate("In the beginning").

        prompt: a text, or tokens. temperature 0: always the likeliest token; top_k 0: all candidates.
        min_p, top_n_sigma and typical_p: as in Sampling. The defaults, and what a seed gives, are those of examples/generate. specials: control tokens in the
        prompt are commands. What is wrong with the arguments is raised by this call.
        """
        sampling = Sampling(
            temperature, top_k, top_p, seed, min_p=min_p, top_n_sigma=top_n_sigma, typical_p=typical_p
        )
        return _generate.start(self, prompt, max_tokens, sampling, specials, cache_dtype, executor)

    def generate_batch(
        self,
        prompts: Sequence[Union[str, bytes, Sequence[int]]],
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 1.0,
        seed: int = 4,
        min_p: float = 0.0,
        top_n_sigma: float = 0.0,
        typical_p: float = 1.0,
        specials: bool = False,
        cache_dtype: Optional[str] = None,
        executor: Optional[Executor] = None,
    ) -> List[str]:
        """The texts that follow several prompts, computed together.

        Each has the bits that it has alone: text i is "".join(generate(prompts[i], seed=seed + i)).
        """
        sampling = Sampling(
            temperature, top_k, top_p, seed, min_p=min_p, top_n_sigma=top_n_sigma, typical_p=typical_p
        )
        return _generate.batch(self, prompts, max_tokens, sampling, specials, cache_dtype, executor)

    def executor_of(self, executor: Optional[Executor]) -> Executor:
        """The executor of a call: the given one, or the model's."""
        if executor is not None:
            return executor
        if self._executor.forked and self._has_own:
            self._executor = self._library.executor()
        return self._executor


def _progress(function: Optional[Callable[[int, int], Any]], raised: list) -> Any:
    """The function in C. Its first exception goes to `raised`, because C cannot pass it on."""
    if function is None:
        return _abi_model.Progress()
    if not callable(function):
        raise TypeError(f"progress is of type {type(function).__name__}; need a function of (done, total)")

    def call(_, done, total):
        if not raised:
            try:
                function(done, total)
            except BaseException as error:
                raised.append(error)

    return _abi_model.Progress(call)


def _cancelled(raised: list) -> Any:
    """The function that ends the loading once `raised` has something.

    Python handles the signals that came meanwhile when C calls this, and what their handlers raise, such as
    KeyboardInterrupt, goes to `raised`. A function would be entered before its try is; a generator is
    resumed within it.
    """

    def answers():
        while True:
            try:
                yield bool(raised)
            except GeneratorExit:
                return
            except BaseException as error:
                raised.append(error)

    waiting = answers()
    next(waiting)
    # next takes the context, C's argument, for its default.
    return _abi_model.Cancelled(functools.partial(next, waiting))


class StateInfo(NamedTuple):
    """The memory of a ModelState."""

    cache_bytes: int  # with what recurrent layers remember
    cache_bytes_per_token: int  # over all layers
    free_tokens: int  # that free pages hold
    scratch_bytes: int  # of all other memory


class ModelState(Object):
    """Sequences in progress; Model.state makes one. One call at a time: another thread's is refused.

    A sequence is a number, which begin and fork return and end frees.
    """

    def __init__(
        self,
        model: Model,
        max_sequences: int,
        max_step_tokens: int,
        cache_tokens: int,
        page_size: int,
        cache_dtype: Optional[str],
        max_bytes: int,
    ):
        library = model.library
        options = _abi_model.ModelStateOptions(
            size=ctypes.sizeof(_abi_model.ModelStateOptions),
            max_sequences=_library.whole("max_sequences", max_sequences),
            max_step_tokens=_library.whole("max_step_tokens", max_step_tokens),
            cache_tokens=_library.whole("cache_tokens", cache_tokens),
            page_size=_library.whole("page_size", page_size),
            cache_dtype=_library.text("cache_dtype", cache_dtype),
            max_bytes=_library.whole("max_bytes", max_bytes),
        )
        create = library._c.quern_model_state_create
        super().__init__(library, library._create(create, model._handle, ctypes.byref(options)))
        self.model = model

    def _check(self, status: int) -> None:
        _errors.check(self._library._c, status, self._handle)

    def info(self) -> StateInfo:
        info = _abi_model.ModelStateInfo(size=ctypes.sizeof(_abi_model.ModelStateInfo))
        self._check(self._library._c.quern_model_state_get_info(self._handle, ctypes.byref(info)))
        return StateInfo(info.cache_bytes, info.cache_bytes_per_token, info.free_tokens, info.scratch_bytes)

    def begin(self) -> int:
        """Starts an empty sequence. ResourceExhaustedError where there are max_sequences already."""
        sequence = ctypes.c_int32()
        self._check(self._library._c.quern_model_state_begin(self._handle, ctypes.byref(sequence)))
        return sequence.value

    def fork(self, sequence: int) -> int:
        """Starts a sequence that begins with all tokens of another, which are not computed again."""
        forked = ctypes.c_int32()
        (sequence,) = _tokenizer.ints("sequence", [sequence])
        self._check(self._library._c.quern_model_state_fork(self._handle, sequence, ctypes.byref(forked)))
        return forked.value

    def end(self, sequence: int) -> None:
        """Ends a sequence and frees its part of the cache. Its number may then be another's."""
        (sequence,) = _tokenizer.ints("sequence", [sequence])
        self._check(self._library._c.quern_model_state_end(self._handle, sequence))

    def length(self, sequence: int) -> int:
        """The number of tokens of a sequence."""
        length = ctypes.c_int64()
        (sequence,) = _tokenizer.ints("sequence", [sequence])
        self._check(self._library._c.quern_model_state_length(self._handle, sequence, ctypes.byref(length)))
        return length.value

    def forward(
        self,
        items: Sequence[Tuple[int, Sequence[int]]],
        *,
        all_logits: bool = False,
        executor: Optional[Executor] = None,
    ) -> Any:
        """Appends tokens to sequences and returns the logits of what follows, f32[rows, vocab], as a new array.

        items: (sequence, tokens) pairs, each of another sequence. A row for each item, after its last
        token; all_logits: for each token, item by item. The bits of a sequence depend neither on the
        other items nor on the executor. A refused call leaves every sequence as it was.
        """
        logits = self.forward_c(items, all_logits, executor)
        shape = tuple(logits.shape[:2])
        copy = _tensor.empty(shape, "f32")
        if 0 not in shape:
            ctypes.memmove(copy._address, logits.data, 4 * shape[0] * shape[1])
        return copy if _tensor.numpy is None else copy.numpy()

    def forward_c(
        self, items: Sequence[Tuple[int, Sequence[int]]], all_logits: bool, executor: Optional[Executor]
    ) -> _abi.Tensor:
        """As forward, but the logits are the state's, until its next forward."""
        listed, keep = (_abi_model.ModelItem * len(items))(), []
        for to, (sequence, tokens) in zip(listed, items):
            tokens = _tokenizer.ints("tokens", tokens)
            (to.sequence,) = _tokenizer.ints("sequence", [sequence])
            to.tokens = ctypes.cast(tokens, ctypes.POINTER(ctypes.c_int32))
            to.num_tokens = len(tokens)
            keep.append(tokens)
        step = _abi_model.ModelStep(
            size=ctypes.sizeof(_abi_model.ModelStep), items=listed, num_items=len(listed), all_logits=bool(all_logits)
        )
        logits = _abi.Tensor()
        handle = _library.handle_of(self.model.executor_of(executor), self._library)
        self._check(
            self._library._c.quern_model_state_forward(self._handle, ctypes.byref(step), handle, ctypes.byref(logits))
        )
        del keep
        return logits
