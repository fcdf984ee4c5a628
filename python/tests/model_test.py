"""Models: the shipped one, against examples/generate and against what a program in NumPy has computed."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import unittest
import weakref

import numpy as np

import quern
from quern import _abi_model, _generate, _tokenizer

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / "models" / "quern_kjv_4m"
_FILE = _FOLDER / "quern-kjv-4m.bf16.gguf"
_PROMPT = "In the beginning"


def printed(*arguments):
    """What examples/generate prints after the prompt."""
    program = _ROOT / "examples" / "generate" / "generate"
    command = [program, f"--model={_FILE}", f"--prompt={_PROMPT}", "--threads=1", *arguments]
    text = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
    return text[len(_PROMPT) : -1]


def golden():
    """(text, tokens, tokens that follow, {token: logit}) of each prompt."""
    lines = [line.split(" ") for line in (_FOLDER / "golden.txt").read_text().splitlines()]
    for line, top in zip(lines, lines[1:]):
        if line[0] == "prompt":
            logits = dict(pair.split(":") for pair in top[1].split(","))
            tokens, following = ([int(t) for t in listed.split(",")] for listed in line[2:4])
            yield bytes.fromhex(line[1]).decode(), tokens, following, {int(t): float(v) for t, v in logits.items()}


class ModelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # One thread, because tests share the machine.
        cls.executor = quern.Executor(1)
        cls.model = quern.Model(_FILE, executor=cls.executor)

    @classmethod
    def tearDownClass(cls):
        del cls.model
        cls.executor.close()

    def test_says_what_it_is(self):
        model = self.model
        self.assertEqual((model.context, model.vocab, model.hidden, model.layers), (256, 2048, 256, 6))
        self.assertGreater(model.weight_bytes, 2 * 2048 * 256)
        self.assertIn("model of 6 layers", repr(model))

    def test_logits_and_tokens_are_those_of_another_program(self):
        cases = list(golden())
        self.assertGreater(len(cases), 2)
        model = quern.Model(_FILE, weights="f32", executor=self.executor)
        for text, tokens, following, top in cases:
            self.assertEqual(model.tokenizer.encode(text), tokens)
            state = model.state(cache_dtype="f32")
            (row,) = state.forward([(state.begin(), tokens)])
            for token, logit in top.items():
                self.assertAlmostEqual(row[token], logit, delta=1e-4)
            made = model.generate(text, max_tokens=len(following), temperature=0, cache_dtype="f32")
            made.text()
            self.assertEqual(made.tokens, following)
        # Sums of f32 in another order, as in models/decoder/decoder_golden_test.cc.
        want = np.fromfile(_FOLDER / "golden_logits_prompt0.f32", np.float32)
        state = model.state(cache_dtype="f32")
        (row,) = state.forward([(state.begin(), cases[0][1])])
        np.testing.assert_allclose(row, want, atol=1e-4)

    def test_texts_are_those_of_examples_generate(self):
        for words, options in (
            (["--temperature=0", "--max_tokens=40"], dict(temperature=0, max_tokens=40)),
            (["--max_tokens=40"], dict(max_tokens=40)),
            (["--seed=9", "--top_k=0", "--top_p=0.9"], dict(seed=9, top_k=0, top_p=0.9)),
            (["--top_k=0", "--min_p=0.05"], dict(top_k=0, min_p=0.05)),
            (
                ["--temperature=1.5", "--top_n_sigma=1.5", "--typical_p=0.9"],
                dict(temperature=1.5, top_n_sigma=1.5, typical_p=0.9),
            ),
            (["--temperature=1.5", "--kv=bf16"], dict(temperature=1.5, cache_dtype="bf16")),
        ):
            with self.subTest(words):
                pieces = list(self.model.generate(_PROMPT, **options))
                self.assertGreater(len(pieces), 20)
                self.assertEqual("".join(pieces), printed(*words))

    def test_bytes_serve_as_a_file_does_and_may_go(self):
        data = bytearray(_FILE.read_bytes())
        model = quern.Model(data, executor=self.executor)
        data[:] = bytes(len(data))
        del data
        want = self.model.generate(_PROMPT, max_tokens=8).text()
        self.assertEqual(model.generate(_PROMPT, max_tokens=8).text(), want)

    def test_a_batch_has_the_texts_of_each_alone(self):
        prompts = [_PROMPT, "And it came to pass", self.model.tokenizer.encode("The king"), _PROMPT]
        batch = self.model.generate_batch(prompts, max_tokens=24, seed=7)
        alone = [self.model.generate(p, max_tokens=24, seed=7 + i).text() for i, p in enumerate(prompts)]
        self.assertEqual(batch, alone)
        self.assertNotEqual(batch[0], batch[3])
        self.assertEqual(self.model.generate_batch([]), [])

    def test_bits_do_not_depend_on_threads(self):
        with quern.Executor(2) as executor:
            want = self.model.generate(_PROMPT, max_tokens=8, executor=executor).text()
        texts = [None] * 3

        def work(i):
            texts[i] = self.model.generate(_PROMPT, max_tokens=8).text()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(texts, [want] * 3)

    def test_long_prompts_are_read_in_steps(self):
        tokens = [1] + [i % 2000 + 5 for i in range(250)]
        small = quern.Model(_FILE, max_context=64, executor=self.executor)
        step = self.model.step_tokens
        self.model.step_tokens = small.step_tokens = 7
        try:
            made = self.model.generate(tokens, max_tokens=100, temperature=0)
            text = made.text()
            short = small.generate(tokens[:60], temperature=0)
            short.text()
        finally:
            self.model.step_tokens = step
        # A token follows the last one that the context holds.
        self.assertEqual((len(made.tokens), made.stopped_by), (256 - 251 + 1, "context"))
        self.assertEqual((len(short.tokens), short.stopped_by), (64 - 60 + 1, "context"))
        self.assertEqual(self.model.generate(tokens, max_tokens=100, temperature=0).text(), text)

    def test_what_ends_a_text_is_told(self):
        made = self.model.generate(_PROMPT, max_tokens=3, temperature=0)
        self.assertIsNone(made.stopped_by)
        text = made.text()
        self.assertEqual((made.stopped_by, len(made.tokens)), ("max_tokens", 3))
        self.assertEqual(self.model.tokenizer.decode(made.tokens, continues=True), text)
        words, third = self.model.tokenizer, made.tokens[2]
        words.is_end = lambda token: token == third
        try:
            ended = self.model.generate(_PROMPT, max_tokens=9, temperature=0)
            self.assertEqual(ended.text(), words.decode(made.tokens[:2], continues=True))
            self.assertEqual((ended.stopped_by, ended.tokens), ("end", made.tokens[:2]))
            (alone,) = self.model.generate_batch([_PROMPT], max_tokens=9, temperature=0)
            self.assertEqual(alone, words.decode(made.tokens[:2], continues=True))
        finally:
            del words.is_end

    def test_a_text_that_is_closed_frees_its_state(self):
        model = quern.Model(_FILE, executor=self.executor)
        made = model.generate(_PROMPT)
        self.assertTrue(next(made))
        seen = weakref.ref(model)
        del model
        gc.collect()
        self.assertTrue(next(made))  # keeps the model
        self.assertIsNotNone(seen())
        made.close()
        gc.collect()
        self.assertIsNone(seen())
        self.assertEqual(list(made), [])

    def test_a_text_that_ends_within_a_character_says_so(self):
        tokens = self.model.tokenizer.encode("\u20ac", bos=False)[:-1]
        self.assertGreater(len(tokens), 2)
        patched = quern.Sampler.sample_c
        for run in (lambda **o: self.model.generate(_PROMPT, **o).text(), self.batch_of_one):
            left = list(tokens)
            quern.Sampler.sample_c = lambda *_: [left.pop(0)]
            try:
                self.assertEqual(run(max_tokens=len(tokens)), self.model.tokenizer.decode(tokens, continues=True))
            finally:
                quern.Sampler.sample_c = patched

    def batch_of_one(self, **options):
        (text,) = self.model.generate_batch([_PROMPT], **options)
        return text

    def test_damaged_weights_are_told(self):
        request = _generate._Request(self.model, [_PROMPT], 4, quern.Sampling(), False, "f16", None)
        request.sampler.sample_c = lambda *_: [_abi_model.NO_TOKEN]
        with self.assertRaisesRegex(quern.DataLossError, "weights are damaged"):
            next(quern.Generation(request))

    def test_progress_is_told_and_its_exception_is_raised(self):
        told = []
        quern.Model(_FILE, progress=lambda done, total: told.append((done, total)), executor=self.executor)
        self.assertGreater(len(told), 1)
        self.assertEqual(told[-1][0], told[-1][1])
        self.assertEqual(told, sorted(told))

        def fail(done, total):
            raise KeyError("told")

        self.assertRaisesRegex(KeyError, "told", quern.Model, _FILE, progress=fail, executor=self.executor)

    def test_what_progress_raises_and_an_interrupt_end_the_loading(self):
        told = []

        def fail(done, total):
            told.append(done)
            raise KeyError("told")

        self.assertRaisesRegex(KeyError, "told", quern.Model, _FILE, progress=fail, executor=self.executor)
        self.assertEqual(len(told), 1)

        def interrupt(done, total):
            told.append(done)
            if len(told) == 3:
                os.kill(os.getpid(), signal.SIGINT)

        told.clear()
        self.assertRaises(KeyboardInterrupt, quern.Model, _FILE, progress=interrupt, executor=self.executor)
        self.assertLess(len(told), 6)
        # A signal that comes while C runs is raised by the call, too, and no handler's exception is lost.
        lost = []
        sys.unraisablehook, hook = lost.append, sys.unraisablehook
        former = signal.signal(signal.SIGALRM, lambda *_: exec("raise TimeoutError"))
        try:
            with self.assertRaises(TimeoutError):
                for _ in range(1000):
                    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
                    quern.Model(_FILE, executor=self.executor)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)
            sys.unraisablehook = hook
        self.assertEqual(lost, [])
        # What was interrupted leaves nothing behind.
        self.assertTrue(quern.Model(_FILE, executor=self.executor).generate(_PROMPT, max_tokens=4).text())

    def test_weights_and_caches_have_one_name_and_default(self):
        want = self.model.generate(_PROMPT, max_tokens=20).text()
        for weights in ("file", "as_in_file"):  # the name of 0.2
            model = quern.Model(_FILE, weights=weights, executor=self.executor)
            self.assertEqual(model.generate(_PROMPT, max_tokens=20, cache_dtype="bf16").text(), want)
        (row,), (same,) = (
            state.forward([(state.begin(), [1, 2, 3])])
            for state in (self.model.state(), self.model.state(cache_dtype="bf16"))
        )
        np.testing.assert_array_equal(row, same)

    def test_refusals(self):
        data = _FILE.read_bytes()
        model, generate = self.model, self.model.generate
        closed = quern.Executor(1)
        closed.close()
        cases = [
            (FileNotFoundError, "cannot open 'no/such.gguf'", lambda: quern.Model("no/such.gguf")),
            (LookupError, "no/such.gguf", lambda: quern.Tokenizer("no/such.gguf")),
            (ValueError, "", lambda: quern.Model(_FOLDER)),
            (ValueError, "the rest of the file has room for", lambda: quern.Model(data[:1000])),
            (ValueError, "the file has 4094288 bytes", lambda: quern.Model(data[: len(data) // 2])),
            (ValueError, "", lambda: quern.Model(b"not a model" * 10)),
            (ValueError, "", lambda: quern.Model(b"")),
            (
                ValueError,
                "no key 'llama.context_length'",
                lambda: quern.Model(data.replace(b"llama.context_length", b"llama.context_lengtH")),
            ),
            (TypeError, "of type int; need a path, or bytes", lambda: quern.Model(5)),
            (ValueError, "null character", lambda: quern.Model("a\0b")),
            (ValueError, 'weights="i3"', lambda: quern.Model(_FILE, weights="i3")),
            (TypeError, "activations=1 is of type int", lambda: quern.Model(_FILE, activations=1)),
            (TypeError, "progress is of type int", lambda: quern.Model(_FILE, progress=1)),
            (MemoryError, "", lambda: quern.Model(_FILE, max_bytes=1000)),
            (ValueError, "executor is closed", lambda: quern.Model(_FILE, executor=closed)),
            (ValueError, "executor is closed", lambda: generate(_PROMPT, executor=closed)),
            (ValueError, "of another quern.Library", lambda: generate(_PROMPT, executor=quern.Library().executor(1))),
            (ValueError, "max_tokens=0; need 1", lambda: generate(_PROMPT, max_tokens=0)),
            (TypeError, "max_tokens=1.5 is of type float", lambda: generate(_PROMPT, max_tokens=1.5)),
            (ValueError, "temperature=-1; need", lambda: generate(_PROMPT, temperature=-1)),
            (ValueError, "temperature=nan", lambda: generate(_PROMPT, temperature=float("nan"))),
            (ValueError, "temperature=1e[+]?300", lambda: generate(_PROMPT, temperature=1e300)),
            (ValueError, "top_p=0; need more", lambda: generate(_PROMPT, top_p=0)),
            (ValueError, "top_k=-1; need", lambda: generate(_PROMPT, top_k=-1)),
            (OverflowError, "seed=-1; need", lambda: generate(_PROMPT, seed=-1)),
            (ValueError, "cache_dtype|dtype", lambda: generate(_PROMPT, cache_dtype="f33")),
            (ValueError, "the prompt has no tokens", lambda: generate([])),
            (ValueError, "token 2048; need 0 to 2047", lambda: generate([1, 2048])),
            (ValueError, "257 tokens; the model's context holds 256", lambda: generate([1] * 257)),
            (TypeError, "token=1.5", lambda: generate([1.5])),
            (TypeError, "prompts is of type str", lambda: model.generate_batch(_PROMPT)),
        ]
        for error, words, call in cases:
            with self.subTest(words):
                self.assertRaisesRegex(error, words, call)
        self.assertRaises(quern.Error, quern.Model, "no/such.gguf")


class StateTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = quern.Model(_FILE, executor=quern.Executor(1))

    @classmethod
    def tearDownClass(cls):
        del cls.model

    def test_sequences_do_not_depend_on_each_other(self):
        state = self.model.state(3, cache_tokens=256)
        a, b = state.begin(), state.begin()
        first = state.forward([(a, [1, 300, 301]), (b, [1, 77])])
        self.assertEqual((first.shape, first.dtype), ((2, 2048), np.float32))
        kept = first.copy()
        c = state.fork(a)
        second = state.forward([(c, [9]), (b, [5, 6]), (a, [10])], all_logits=True)
        np.testing.assert_array_equal(first, kept)  # not the state's memory
        self.assertEqual(second.shape, (4, 2048))
        self.assertEqual([state.length(s) for s in (a, b, c)], [4, 4, 4])
        alone = self.model.state(1)
        for tokens, row in (
            ([1, 300, 301], first[0]),
            ([1, 77], first[1]),
            ([1, 300, 301, 9], second[0]),
            ([1, 77, 5], second[1]),
            ([1, 77, 5, 6], second[2]),
            ([1, 300, 301, 10], second[3]),
        ):
            sequence = alone.begin()
            np.testing.assert_array_equal(alone.forward([(sequence, np.array(tokens))])[0], row, str(tokens))
            alone.end(sequence)
        free = state.info().free_tokens
        state.end(b)
        self.assertGreater(state.info().free_tokens, free)
        self.assertIn("state of a model", state.explain())

    def test_a_refused_step_changes_nothing(self):
        state = self.model.state(1, max_step_tokens=8, cache_tokens=64)
        a = state.begin()
        before = state.forward([(a, [1, 2, 3])])
        cases = [
            (MemoryError, "", lambda: state.begin()),
            (MemoryError, "", lambda: state.fork(a)),
            (ValueError, "", lambda: state.forward([(a + 1, [1])])),
            (ValueError, "", lambda: state.forward([(a, [2048])])),
            (ValueError, "", lambda: state.forward([(a, [1]), (a, [2])])),
            (ValueError, "num_tokens", lambda: state.forward([(a, [])])),
            (ValueError, "", lambda: state.forward([(a, [1] * 9)])),
            (OverflowError, "tokens has a number", lambda: state.forward([(a, [2**31])])),
            (OverflowError, "sequence has a number", lambda: state.forward([(2**32 + a, [1])])),
            (TypeError, "tokens are b'abcd'", lambda: state.forward([(a, b"abcd")])),
            (TypeError, "tokens are 5", lambda: state.forward([(a, 5)])),
            (TypeError, "tokens are \\[1.5\\]", lambda: state.forward([(a, [1.5])])),
            (ValueError, "not a sequence", lambda: state.length(a + 1)),
            (ValueError, "", lambda: state.end(a + 1)),
            (OverflowError, "max_sequences", lambda: self.model.state(2**64 + 1)),
        ]
        for error, words, call in cases:
            with self.subTest(words):
                self.assertRaisesRegex(error, words, call)
        self.assertEqual(state.length(a), 3)
        state.end(a)
        a = state.begin()
        np.testing.assert_array_equal(state.forward([(a, [1, 2, 3])]), before)

    def test_a_state_keeps_its_model(self):
        model = quern.Model(_FILE, executor=self.model._executor)
        state = model.state(cache_tokens=32)
        want = state.forward([(state.begin(), [1, 2])])
        other = model.state(cache_tokens=32)
        del model, state
        gc.collect()
        np.testing.assert_array_equal(other.forward([(other.begin(), [1, 2])]), want)


class TextTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.words = quern.Tokenizer(_FILE)

    def test_tokens_are_those_of_another_program(self):
        lines = [line.split(" ") for line in (_FOLDER / "tokenizer_golden.txt").read_text().splitlines()]
        self.assertGreater(len(lines), 20)
        for text, tokens, back in (["" if part == "-" else part for part in line] for line in lines):
            tokens = [int(t) for t in tokens.split(",") if t]
            self.assertEqual(self.words.encode(bytes.fromhex(text), bos=False), tokens)
            self.assertEqual(self.words.decode_bytes(tokens), bytes.fromhex(back))

    def test_special_tokens(self):
        words = self.words
        self.assertEqual((words.vocab, words.bos, words.eos, words.adds_bos), (2048, 1, 2, True))
        self.assertEqual(words.encode("Hello")[0], 1)
        self.assertEqual(words.encode("Hello")[1:], words.encode("Hello", bos=False))
        self.assertIn(2, words.encode("a</s>", specials=True))
        self.assertNotIn(2, words.encode("a</s>"))
        self.assertEqual(words.decode([1, 2, 5000, -1]), "")
        self.assertEqual([words.is_end(t) for t in (1, 2, 3)], [False, True, False])
        self.assertRaises(OverflowError, words.is_end, 2**31)
        self.assertRaises(TypeError, words.encode, 5)
        self.assertRaises(UnicodeEncodeError, words.encode, "\ud800")

    def test_characters_come_when_they_are_whole(self):
        text = _generate._Text(self.words)
        tokens = self.words.encode("a\u20ac\U0001f600", bos=False)
        self.assertGreater(len(tokens), 5)
        pieces = [text.add(token) for token in tokens]
        self.assertIn("", pieces)
        self.assertEqual("".join(pieces) + text.finish(), " a\u20ac\U0001f600")
        for token in tokens[:-1]:
            text.add(token)
        self.assertEqual(text.finish(), "\ufffd")

    def test_long_texts_and_those_that_do_not_fit_at_first(self):
        guesses = _tokenizer._TOKENS_OF_A_BYTE, _tokenizer._BYTES_OF_A_TOKEN
        for guess in (guesses, (0, 0)):
            _tokenizer._TOKENS_OF_A_BYTE, _tokenizer._BYTES_OF_A_TOKEN = guess
            try:
                for text in ("a", "ab", "\u20ac" * 5000 + "\0" + "word " * 3000):
                    # Not assertEqual, which takes minutes to show where long texts differ.
                    self.assertTrue(self.words.decode(self.words.encode(text)) == text, text[:9])
            finally:
                _tokenizer._TOKENS_OF_A_BYTE, _tokenizer._BYTES_OF_A_TOKEN = guesses

    def test_a_destroyed_tokenizer_is_refused(self):
        words = quern.Tokenizer(_FILE)
        words._finalizer()
        for call in (lambda: words.encode("a"), lambda: words.decode([5]), lambda: words.is_end(5)):
            self.assertRaisesRegex(RuntimeError, "was destroyed", call)


if __name__ == "__main__":
    unittest.main()
