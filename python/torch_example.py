"""An operator of one's own in PyTorch, on a kernel of Quern, with a gradient, in a module.

    python3 -m torch_example

The steps: define, implement for the CPU, say what the result looks like, add autograd, use in a module.
"""

import torch

import quern.torch


# README: an operator of one's own
def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(y)."""
    return torch.ops.quern.sigmoid_mul(x, y)


def gate_fake(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


own = torch.library.Library("example", "DEF")
operator = quern.torch.register("gate", gate, fake_impl=gate_fake, target_lib=own)


# README: its gradient
class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return gate(x, y)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        s = torch.sigmoid(y)
        return grad * s, grad * x * s * (1 - s)


own.impl("gate", Gate.apply, "Autograd")


# README: a module
class Gated(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.project = torch.nn.Linear(features, features)

    def forward(self, x):
        return torch.ops.example.gate(x, self.project(x))


# README: the end


def main():
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 8, requires_grad=True).unbind(0)
    torch.testing.assert_close(operator(x, y), x * torch.sigmoid(y))
    assert operator(x.to("meta"), y.to("meta")).shape == x.shape

    module = Gated(8)
    out = module(x)
    out.sum().backward()
    have = module.project.weight.grad.clone()
    module.project.weight.grad = None
    (x * torch.sigmoid(module.project(x))).sum().backward()
    torch.testing.assert_close(have, module.project.weight.grad)

    # An argument that is written: the schema says so, and torch.compile believes it.
    def scale(x: torch.Tensor, by: float = 2.0) -> None:
        x.mul_(by)

    quern.torch.register("scale", scale, mutates_args=["x"], fake_impl=lambda x, by=2.0: None, target_lib=own)
    z = torch.ones(3)
    assert torch.ops.example.scale(z, 3.0) is None and z.tolist() == [3.0] * 3
    (schema,) = torch._C._jit_get_schemas_for_operator("example::scale")
    assert schema.arguments[0].alias_info.is_write
    print("the results are as expected")


if __name__ == "__main__":
    main()
