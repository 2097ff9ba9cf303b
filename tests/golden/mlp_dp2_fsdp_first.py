"""Rank 0 of 2 (dp 0): stage 0 of 1, layers.0 to out.

training, schedule 1f1b, 1 microbatches, placements *: fsdp
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 0, {'dp': 2}
PLACE = (0,)  # the pp rank of each stage
MICROBATCHES = 1
DEVICE = torch.device("cpu")  # the world's device when the program runs


def layers_0_forward(b, B, x, p0_weight, p0_bias):
    """Forward of layers.0."""
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(p0_weight)
    addmm = aten.addmm.default(p0_bias, x, t)
    del t
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh = aten.tanh.out(addmm, out=addmm)
    return tanh, (tanh, x)


def layers_0_backward(b, B, dx, tanh, x, p0_weight, p0_bias):
    """Backward of layers.0."""
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh_backward = aten.tanh_backward.default(dx, tanh)
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t_1 = aten.t.default(tanh_backward)
    mm = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(tanh_backward, [0], True)
    view = aten.view.default(sum, [8])
    return (mm, view)


def layers_forward(b, B, x, p0_weight, p0_bias):
    """Forward of layers.1 to layers.3."""
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(p0_weight)
    addmm = aten.addmm.default(p0_bias, x, t)
    del t
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh = aten.tanh.out(addmm, out=addmm)
    return tanh, (tanh, x)


def layers_backward(b, B, dx, tanh, x, p0_weight, p0_bias):
    """Backward of layers.1 to layers.3."""
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh_backward = aten.tanh_backward.default(dx, tanh)
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    mm = aten.mm.default(tanh_backward, p0_weight)
    t_1 = aten.t.default(tanh_backward)
    mm_1 = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(tanh_backward, [0], True)
    view = aten.view.default(sum, [8])
    return mm, (mm_1, view)


def out_forward(b, B, x, y, weight, bias):
    """Forward of out."""
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(weight)
    addmm = aten.addmm.default(bias, x, t)
    del t
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    sub = aten.sub.Tensor(addmm, y)
    pow = aten.pow.Tensor_Scalar(sub, 2)
    sum = aten.sum.dim_IntList(pow, [0, 1], False, dtype=torch.float64)
    div = aten.div.Tensor(sum, 3 * B)
    return div, (addmm, y, x)


def out_backward(b, B, dx, addmm, y, x, weight, bias):
    """Backward of out."""
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    sub_1 = aten.sub.Tensor(addmm, y)
    mul = aten.mul.Tensor(sub_1, 0.6666666666666666 / B)
    mul_1 = aten.mul.Tensor(mul, dx)
    del sub_1, mul
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    mm = aten.mm.default(mul_1, weight)
    t_1 = aten.t.default(mul_1)
    mm_1 = aten.mm.default(t_1, x)
    sum_1 = aten.sum.dim_IntList(mul_1, [0], True)
    view = aten.view.default(sum_1, [3])
    return mm, (mm_1, view)


def stage0_forward(world, batch, k):
    b, B = batch.sizes[k], batch.size
    x = batch.input("args[0]", k)
    y = batch.input("args[1]", k)
    saved = []
    world.all_gather((*(f"layers.{i}" for i in range(4)), "out"), axis="dp")
    layers_0, kept = layers_0_forward(b, B, x, *world.gathered("layers.0"))
    saved.append(kept)
    layers = layers_0
    for i in range(1, 4):
        layers, kept = layers_forward(b, B, layers, *world.gathered(f"layers.{i}"))
        saved.append(kept)
    out, kept = out_forward(b, B, layers, y, *world.gathered("out"))
    saved.append(kept)
    return out, saved


def stage0_backward(world, batch, k, saved):
    b, B = batch.sizes[k], batch.size
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    world.all_gather(("out", *(f"layers.{i}" for i in reversed(range(4)))), axis="dp")
    d_out, grads = out_backward(b, B, one, *saved.pop(), *world.gathered("out"))
    world.keep("out", grads)
    d_layers = d_out
    for i in reversed(range(1, 4)):
        d_layers, grads = layers_backward(b, B, d_layers, *saved.pop(), *world.gathered(f"layers.{i}"))
        world.keep(f"layers.{i}", grads)
    grads = layers_0_backward(b, B, d_layers, *saved.pop(), *world.gathered("layers.0"))
    world.keep("layers.0", grads)
    world.reduce_scatter(("out", *(f"layers.{i}" for i in reversed(range(4)))), axis="dp")


def step(world, batch):
    """1 forward, then 1 backward."""
    saved_0 = world.store()
    loss = {}
    with world.action("F", stage=0, microbatch=0):
        loss[0], saved_0[0] = stage0_forward(world, batch, 0)
    with world.action("B", stage=0, microbatch=0):
        stage0_backward(world, batch, 0, saved_0.pop(0))
    world.wait()  # until the gradients that are being reduced are there
    loss = world.total(list(loss.values()), shape=(), dtype=torch.float64)
    return {"loss": loss}
