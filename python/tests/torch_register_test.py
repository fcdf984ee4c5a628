"""quern.torch.register: schemas from annotations, mutated arguments, fakes, keys, libraries."""

import unittest
from typing import List, Optional, Tuple

import torch

import quern.torch


def both(x: torch.Tensor, y: Optional[torch.Tensor], n: int, s: float = 0.5, name: str = "a") -> Tuple[
    torch.Tensor, torch.Tensor
]:
    return x * s + n, x if y is None else y + 1


def write(out: torch.Tensor, parts: List[torch.Tensor], flag: bool = False) -> None:
    out.copy_(sum(parts) * (2 if flag else 1))


class RegisterTest(unittest.TestCase):
    lib = torch.library.Library("quern_test_register", "DEF")

    def schema(self, name):
        (schema,) = torch._C._jit_get_schemas_for_operator(f"quern_test_register::{name}")
        return schema

    def test_the_schema_is_that_of_the_annotations(self):
        operator = quern.torch.register("both", both, target_lib=self.lib)
        schema = self.schema("both")
        self.assertEqual([a.name for a in schema.arguments], ["x", "y", "n", "s", "name"])
        self.assertEqual(
            [str(a.type) for a in schema.arguments], ["Tensor", "Optional[Tensor]", "int", "float", "str"]
        )
        self.assertEqual((len(schema.returns), schema.arguments[3].default_value), (2, 0.5))
        a, b = operator(torch.ones(2), torch.ones(2), 3)
        self.assertEqual((a.tolist(), b.tolist()), ([3.5, 3.5], [2.0, 2.0]))
        with self.assertRaises(RuntimeError):
            operator(torch.ones(2), torch.ones(2))

    def test_mutated_arguments(self):
        operator = quern.torch.register("write", write, ["out"], target_lib=self.lib)
        written = [a.name for a in self.schema("write").arguments if a.alias_info and a.alias_info.is_write]
        self.assertEqual(written, ["out"])
        out = torch.zeros(2)
        self.assertIsNone(operator(out, [torch.ones(2), torch.ones(2)], True))
        self.assertEqual(out.tolist(), [4.0, 4.0])
        with self.assertRaises((ValueError, RuntimeError)):
            quern.torch.register("none_such", write, ["input"], target_lib=self.lib)

    def test_fakes_and_keys(self):
        def grow(x: torch.Tensor, n: int) -> torch.Tensor:
            return torch.cat([x] * n)

        operator = quern.torch.register(
            "grow", grow, None, lambda x, n: x.new_empty((x.shape[0] * n,) + x.shape[1:]), self.lib, tags=()
        )
        self.assertEqual(operator(torch.ones(2, 3), 2).shape, (4, 3))
        self.assertEqual(operator(torch.ones(2, 3, device="meta"), 2).shape, (4, 3))
        anywhere = quern.torch.register("anywhere", grow, target_lib=self.lib, dispatch_key="CompositeExplicitAutograd")
        self.assertEqual(anywhere(torch.ones(2, 3), 2).shape, (4, 3))

    def test_the_library_of_this_package_is_the_default(self):
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        quern.torch.register("twice_of_a_test", twice)
        self.assertEqual(torch.ops.quern.twice_of_a_test(torch.ones(1)).item(), 2)
        with self.assertRaises(RuntimeError):
            quern.torch.register("twice_of_a_test", twice)

    def test_a_function_without_annotations_is_refused(self):
        with self.assertRaises(ValueError):
            quern.torch.register("bare", lambda x: x, target_lib=self.lib)


if __name__ == "__main__":
    unittest.main()
