"""Rank 0 of 4 (pp 0, dp 0): stage 0 of 2, layers.0 to layers.1.

training, schedule 1f1b, 3 microbatches, placements *: fsdp
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 0, {'pp': 2, 'dp': 2}
PLACE = (0, 1)  # the pp rank of each stage
MICROBATCHES = 3
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
    """Forward of layers.1."""
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(p0_weight)
    addmm = aten.addmm.default(p0_bias, x, t)
    del t
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh = aten.tanh.out(addmm, out=addmm)
    return tanh, (tanh, x)


def layers_backward(b, B, dx, tanh, x, p0_weight, p0_bias):
    """Backward of layers.1."""
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh_backward = aten.tanh_backward.default(dx, tanh)
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    mm = aten.mm.default(tanh_backward, p0_weight)
    t_1 = aten.t.default(tanh_backward)
    mm_1 = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(tanh_backward, [0], True)
    view = aten.view.default(sum, [8])
    return mm, (mm_1, view)


def edge_1_0(b):
    """What stage 1 hands to stage 0 for a microbatch of b samples."""
    return (((b, 8), torch.float64),)


def stage0_forward(world, batch, k):
    b, B = batch.sizes[k], batch.size
    x = batch.input("args[0]", k)
    saved = []
    layers_0, kept = layers_0_forward(b, B, x, *world.all_gather("layers.0", axis="dp", then="layers.1"))
    saved.append(kept)
    layers_1, kept = layers_forward(b, B, layers_0, *world.all_gather("layers.1", axis="dp"))
    saved.append(kept)
    return (layers_1,), saved


def stage0_backward(world, batch, k, saved, from_1):
    b, B = batch.sizes[k], batch.size
    # d_layers_1: float64[b, 8], Shard(0) on dp
    (d_layers_1,) = from_1
    d_layers_1_v2, grads = layers_backward(
        b, B, d_layers_1, *saved.pop(), *world.all_gather("layers.1", axis="dp", then="layers.0"),
    )
    world.reduce_scatter("layers.1", grads, axis="dp")
    grads = layers_0_backward(b, B, d_layers_1_v2, *saved.pop(), *world.all_gather("layers.0", axis="dp"))
    world.reduce_scatter("layers.0", grads, axis="dp")


def step(world, batch):
    """1 forward to warm up, 2 times one forward and one backward, 1 backward to drain."""
    saved_0 = world.store()
    acts_0_1 = world.store()
    grads_1_0 = world.store()
    for k in range(2):
        with world.action("F", stage=0, microbatch=k):
            acts_0_1[k], saved_0[k] = stage0_forward(world, batch, k)
        world.send(acts_0_1.pop(k), stage=0, to=1, microbatch=k)
    grads_1_0[0] = world.recv(edge_1_0(batch.sizes[0]), stage=0, source=1, microbatch=0)
    with world.action("B", stage=0, microbatch=0):
        stage0_backward(world, batch, 0, saved_0.pop(0), grads_1_0.pop(0))
    with world.action("F", stage=0, microbatch=2):
        acts_0_1[2], saved_0[2] = stage0_forward(world, batch, 2)
    world.send(acts_0_1.pop(2), stage=0, to=1, microbatch=2)
    for k in range(1, 3):
        grads_1_0[k] = world.recv(edge_1_0(batch.sizes[k]), stage=0, source=1, microbatch=k)
        with world.action("B", stage=0, microbatch=k):
            stage0_backward(world, batch, k, saved_0.pop(k), grads_1_0.pop(k))
    world.wait()  # until the gradients that are being reduced are there
    loss = world.total([], shape=(), dtype=torch.float64)
    return {"loss": loss}
