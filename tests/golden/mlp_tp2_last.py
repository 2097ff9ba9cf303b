"""Rank 1 of 2 (tp 1): stage 0 of 1, layers.0 to out.

training, schedule 1f1b, 1 microbatches, placements *: ddp
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 1, {'tp': 2}
PLACE = (0,)  # the pp rank of each stage
MICROBATCHES = 1
DEVICE = torch.device("cpu")  # the world's device when the program runs


def layers_0_forward(world, b, B, x, p0_weight, p0_bias):
    """Forward of layers.0."""
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(p0_weight)
    addmm = aten.addmm.default(p0_bias, x, t)
    del t
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh = aten.tanh.out(addmm, out=addmm)
    # tanh: Shard(1) -> Replicate() on tp
    tanh_all = world.all_gather_values(tanh, axis="tp", dim=1, pieces=[4, 4])
    return tanh_all, (tanh, x)


def layers_0_backward(world, b, B, dx, tanh, x, p0_weight, p0_bias):
    """Backward of layers.0."""
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    # dx: Partial(sum) -> Shard(1) on tp
    dx_sum = world.reduce_scatter_values(dx, axis="tp", dim=1, pieces=[4, 4])
    tanh_backward = aten.tanh_backward.default(dx_sum, tanh)
    del dx_sum
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t_1 = aten.t.default(tanh_backward)
    mm = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(tanh_backward, [0], True)
    view = aten.view.default(sum, [4])
    return (mm, view)


def layers_forward(world, b, B, x, p0_weight, p0_bias):
    """Forward of layers.1 to layers.2."""
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(p0_weight)
    addmm = aten.addmm.default(p0_bias, x, t)
    del t
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh = aten.tanh.out(addmm, out=addmm)
    # tanh: Shard(1) -> Replicate() on tp
    tanh_all = world.all_gather_values(tanh, axis="tp", dim=1, pieces=[4, 4])
    return tanh_all, (tanh, x)


def layers_backward(world, b, B, dx, tanh, x, p0_weight, p0_bias):
    """Backward of layers.1 to layers.2."""
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    # dx: Partial(sum) -> Shard(1) on tp
    dx_sum = world.reduce_scatter_values(dx, axis="tp", dim=1, pieces=[4, 4])
    tanh_backward = aten.tanh_backward.default(dx_sum, tanh)
    del dx_sum
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    mm = aten.mm.default(tanh_backward, p0_weight)
    t_1 = aten.t.default(tanh_backward)
    mm_1 = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(tanh_backward, [0], True)
    view = aten.view.default(sum, [4])
    return mm, (mm_1, view)


def layers_w2_forward(b, B, x, p0_weight, p0_bias):
    """Forward of layers.3."""
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(p0_weight)
    addmm = aten.addmm.default(p0_bias, x, t)
    del t
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh = aten.tanh.out(addmm, out=addmm)
    return tanh, (tanh, x)


def layers_w2_backward(b, B, dx, tanh, x, p0_weight, p0_bias):
    """Backward of layers.3."""
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh_backward = aten.tanh_backward.default(dx, tanh)
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    mm = aten.mm.default(tanh_backward, p0_weight)
    t_1 = aten.t.default(tanh_backward)
    mm_1 = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(tanh_backward, [0], True)
    view = aten.view.default(sum, [4])
    return mm, (mm_1, view)


def out_forward(world, b, B, x, y, weight, bias):
    """Forward of out."""
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(weight)
    bias_none = aten.zeros_like.default(bias)
    addmm = aten.addmm.default(bias_none, x, t)
    del t, bias_none
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    # addmm: Partial(sum) -> Shard(1) on tp
    addmm_sum = world.reduce_scatter_values(addmm, axis="tp", dim=1, pieces=[2, 1])
    y_part = aten.slice.Tensor(y, 1, 2, 3)
    y_part_ = aten.clone.default(y_part, memory_format=torch.contiguous_format)
    sub = aten.sub.Tensor(addmm_sum, y_part_)
    pow = aten.pow.Tensor_Scalar_out(sub, 2, out=sub)
    sum = aten.sum.dim_IntList(pow, [0, 1], False, dtype=torch.float64)
    # sum: Partial(sum) -> Replicate() on tp
    sum_sum = world.all_reduce_values(sum, axis="tp", how="sum")
    div = aten.div.Tensor(sum_sum, 3 * B)
    return div, (addmm_sum, y_part_, x)


def out_backward(world, b, B, dx, addmm_sum, y_part_, x, weight, bias):
    """Backward of out."""
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    sub_1 = aten.sub.Tensor(addmm_sum, y_part_)
    mul = aten.mul.out(sub_1, 0.6666666666666666 / B, out=sub_1)
    mul_1 = aten.mul.out(mul, dx, out=mul)
    del sub_1, mul
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    # mul_1: Shard(1) -> Replicate() on tp
    mul_1_all = world.all_gather_values(mul_1, axis="tp", dim=1, pieces=[2, 1])
    mm = aten.mm.default(mul_1_all, weight)
    t_1 = aten.t.default(mul_1_all)
    mm_1 = aten.mm.default(t_1, x)
    sum_1 = aten.sum.dim_IntList(mul_1_all, [0], True)
    view = aten.view.default(sum_1, [3])
    return mm, (mm_1, view)


def stage0_forward(world, batch, k):
    b, B = batch.sizes[k], batch.size
    x = batch.input("args[0]", k)
    y = batch.input("args[1]", k)
    saved = []
    layers_0, kept = layers_0_forward(world, b, B, x, *world.parameters("layers.0"))
    saved.append(kept)
    layers = layers_0
    for i in range(1, 3):
        layers, kept = layers_forward(world, b, B, layers, *world.parameters(f"layers.{i}"))
        saved.append(kept)
    layers_3, kept = layers_w2_forward(b, B, layers, *world.parameters("layers.3"))
    saved.append(kept)
    out, kept = out_forward(world, b, B, layers_3, y, *world.parameters("out"))
    saved.append(kept)
    return out, saved


def stage0_backward(world, batch, k, saved):
    b, B = batch.sizes[k], batch.size
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    d_out, grads = out_backward(world, b, B, one, *saved.pop(), *world.parameters("out"))
    world.accumulate("out", grads)
    d_layers_3, grads = layers_w2_backward(b, B, d_out, *saved.pop(), *world.parameters("layers.3"))
    world.accumulate("layers.3", grads)
    d_layers = d_layers_3
    for i in reversed(range(1, 3)):
        d_layers, grads = layers_backward(world, b, B, d_layers, *saved.pop(), *world.parameters(f"layers.{i}"))
        world.accumulate(f"layers.{i}", grads)
    grads = layers_0_backward(world, b, B, d_layers, *saved.pop(), *world.parameters("layers.0"))
    world.accumulate("layers.0", grads)


def step(world, batch):
    """1 forward, then 1 backward."""
    saved_0 = world.store()
    loss = {}
    with world.action("F", stage=0, microbatch=0):
        loss[0], saved_0[0] = stage0_forward(world, batch, 0)
    with world.action("B", stage=0, microbatch=0):
        stage0_backward(world, batch, 0, saved_0.pop(0))
    loss = world.total([], shape=(), dtype=torch.float64)  # place 0 of tp adds it
    return {"loss": loss}
