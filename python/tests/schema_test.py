"""Schemas are read as they are written, and the stubs are theirs."""

import inspect
import pathlib
import re
import unittest

import quern
from quern import _call, _schema, stubs

_ROOT = pathlib.Path(__file__).parents[2]


class SchemaTest(unittest.TestCase):
    def test_reads_every_kind_of_parameter(self):
        line = (
            'f(Tensor x, Tensor(a1!) y, Tensor(a2!)? z, Tensor? w, Ranks? ranks, Weights weights, int n=-1, '
            'float eps=1e-06, bool yes=True, str text="a, (b)", float big=inf) -> (Tensor, Tensor)'
        )
        p = _schema.Parameter
        schema = _schema.parse(line)
        self.assertEqual(
            schema.parameters,
            (
                p("x", "Tensor", False, False, None),
                p("y", "Tensor", False, True, None),
                p("z", "Tensor", True, True, None),
                p("w", "Tensor", True, False, None),
                p("ranks", "Ranks", True, False, None),
                p("weights", "Weights", False, False, None),
                p("n", "int", False, False, -1),
                p("eps", "float", False, False, 1e-6),
                p("yes", "bool", False, False, True),
                p("text", "str", False, False, "a, (b)"),
                p("big", "float", False, False, float("inf")),
            ),
        )
        self.assertEqual((schema.name, schema.returns, schema.outs), ("f", 2, ("out0", "out1")))
        self.assertEqual(_schema.parse("f() -> ()")[1:3], ((), 0))
        self.assertEqual(_schema.parse("f(Tensor x) -> Tensor").outs, ("out",))
        self.assertEqual(_schema.parse(r'f(str a="x\", y", int b=2) -> ()').parameters[0].default, 'x", y')
        for wrong in ("", "f", "f(x) -> Tensor", "f(Tensor x)", "f(int n=?) -> Tensor"):
            with self.assertRaisesRegex(ValueError, "is no schema"):
                _schema.parse(wrong)

    def test_the_library_has_the_schemas_of_its_table(self):
        table = re.findall(r"^\| `([a-z_0-9]+\(.+?)` \|", (_ROOT / "ops" / "README.md").read_text(), re.M)
        self.assertGreater(len(table), 50)
        self.assertEqual(sorted(s.text for s in quern.library().schemas.values()), sorted(table))

    def test_every_operator_is_a_function_with_its_schema(self):
        for schema in quern.library().schemas.values():
            function = getattr(quern.ops, schema.name)
            signature = inspect.signature(function).parameters
            self.assertLessEqual({p.name for p in schema.parameters}, set(signature))
            for p in schema.parameters:
                want = inspect.Parameter.empty if p.required else p.default
                self.assertEqual(signature[p.name].default, want, f"{schema.name} {p.name}")
            self.assertEqual(inspect.getdoc(function).splitlines()[0], schema.text)
        self.assertEqual(dir(quern.ops), sorted(quern.library().schemas))

    def test_help_has_the_equation_shapes_and_dtypes(self):
        library = quern.library()
        for schema in library.schemas.values():
            with self.subTest(schema.name):
                doc = library.doc(schema.name)
                shown = inspect.getdoc(getattr(quern.ops, schema.name))
                self.assertIn(" ".join(doc.split()), " ".join(shown.split()))
                self.assertRegex(doc, r"\w\[[^\]]+\]", "no shape")
                self.assertRegex(doc, r"\b(f32|bf16|f16|[iu]8|i32|i64|any dtype|convert_weight_packed)\b", "no dtype")
                for p in schema.tensors + schema.objects:
                    # Python has no ranks.
                    if p.kind != "Communicator" and p.kind != "RotaryScaling":
                        self.assertRegex(doc, rf"\b{p.name}\b")
        self.assertIn("x / sqrt(mean over i of x^2 + eps) * weight", library.doc("rms_norm"))
        with self.assertRaises(quern.NotFoundError):
            library.doc("no_such_operator")

    def test_parameters_that_follow_optional_ones_are_by_name(self):
        schema = _schema.parse("f(Tensor x, Tensor? y, int n, int m=1) -> Tensor")
        parts = [part for part, _ in _call._signature(schema)]
        self.assertEqual(parts, ["x", "y=None", "*", "n", "m=1", "out=None", "executor=None", "provider=None"])

    def test_a_parameter_of_a_taken_name_is_refused(self):
        schema = _schema.parse("f(Tensor out) -> Tensor")
        with self.assertRaisesRegex(ValueError, "f has a parameter whose name"):
            _call.make(quern.library(), schema)

    def test_the_stubs_are_generated(self):
        have = (_ROOT / "python" / "quern" / "ops.pyi").read_text()
        self.assertEqual(have, stubs.text(quern.library().schemas.values()), "run python3 -m quern.stubs")


if __name__ == "__main__":
    unittest.main()
