"""Rank 0 of 2 (pp 0): stage 0 of 2, layers.0.

training, schedule zb-h1, 3 microbatches, placements *: ddp
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 0, {'pp': 2}
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


def layers_0_backward_weight(b, B, dx, tanh, x):
    """Backward of layers.0 for its weights (wgrad)."""
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh_backward = aten.tanh_backward.default(dx, tanh)
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t_1 = aten.t.default(tanh_backward)
    mm = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(tanh_backward, [0], True)
    view = aten.view.default(sum, [8])
    return (mm, view)


def edge_1_0(b):
    """What stage 1 hands to stage 0 for a microbatch of b samples."""
    return (((b, 8), torch.float64),)


def stage0_forward(world, batch, k):
    b, B = batch.sizes[k], batch.size
    x = batch.input("args[0]", k)
    saved = []
    layers_0, kept = layers_0_forward(b, B, x, *world.parameters("layers.0"))
    saved.append(kept)
    return (layers_0,), saved


def stage0_backward_weight(world, batch, k, saved, from_1):
    b, B = batch.sizes[k], batch.size
    # d_layers_0: float64[b, 8]
    (d_layers_0,) = from_1
    grads = layers_0_backward_weight(b, B, d_layers_0, *saved.pop())
    world.accumulate("layers.0", grads)


def step(world, batch):
    """3 forwards, 3 backwards for inputs and 3 backwards for weights."""
    saved_0 = world.store()
    acts_0_1 = world.store()
    grads_1_0 = world.store()
    for k in range(2):
        with world.action("F", stage=0, microbatch=k):
            acts_0_1[k], saved_0[k] = stage0_forward(world, batch, k)
        world.send(acts_0_1.pop(k), stage=0, to=1, microbatch=k)
    grads_1_0[0] = world.recv(edge_1_0(batch.sizes[0]), stage=0, source=1, microbatch=0)
    with world.action("I", stage=0, microbatch=0):
        pass  # no gradient leaves this stage: its backward is all W
    with world.action("W", stage=0, microbatch=0):
        stage0_backward_weight(world, batch, 0, saved_0.pop(0), grads_1_0.pop(0))
    with world.action("F", stage=0, microbatch=2):
        acts_0_1[2], saved_0[2] = stage0_forward(world, batch, 2)
    grads_1_0[1] = world.recv(edge_1_0(batch.sizes[1]), stage=0, source=1, microbatch=1)
    world.send(acts_0_1.pop(2), stage=0, to=1, microbatch=2)
    with world.action("I", stage=0, microbatch=1):
        pass  # no gradient leaves this stage: its backward is all W
    with world.action("W", stage=0, microbatch=1):
        stage0_backward_weight(world, batch, 1, saved_0.pop(1), grads_1_0.pop(1))
    grads_1_0[2] = world.recv(edge_1_0(batch.sizes[2]), stage=0, source=1, microbatch=2)
    with world.action("I", stage=0, microbatch=2):
        pass  # no gradient leaves this stage: its backward is all W
    with world.action("W", stage=0, microbatch=2):
        stage0_backward_weight(world, batch, 2, saved_0.pop(2), grads_1_0.pop(2))
    loss = world.total([], shape=(), dtype=torch.float64)
    return {"loss": loss}
