"""Rank 1 of 2 (pp 1): stage 1 of 2, layers.1 to out.

training, schedule zb-h1, 3 microbatches, placements *: ddp
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 1, {'pp': 2}
PLACE = (0, 1)  # the pp rank of each stage
MICROBATCHES = 3
DEVICE = torch.device("cpu")  # the world's device when the program runs


def layers_forward(b, B, x, p0_weight, p0_bias):
    """Forward of layers.1 to layers.3."""
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(p0_weight)
    addmm = aten.addmm.default(p0_bias, x, t)
    del t
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh = aten.tanh.out(addmm, out=addmm)
    return tanh, (tanh, x)


def layers_backward_input(b, B, dx, tanh, x, p0_weight, p0_bias):
    """Backward of layers.1 to layers.3 for its inputs (dgrad)."""
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh_backward = aten.tanh_backward.default(dx, tanh)
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    mm = aten.mm.default(tanh_backward, p0_weight)
    return mm, (x, tanh_backward)


def layers_backward_weight(b, B, x, tanh_backward):
    """Backward of layers.1 to layers.3 for its weights (wgrad)."""
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t_1 = aten.t.default(tanh_backward)
    mm_1 = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(tanh_backward, [0], True)
    view = aten.view.default(sum, [8])
    return (mm_1, view)


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


def out_backward_input(b, B, dx, addmm, y, x, weight, bias):
    """Backward of out for its inputs (dgrad)."""
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    sub_1 = aten.sub.Tensor(addmm, y)
    mul = aten.mul.Tensor(sub_1, 0.6666666666666666 / B)
    mul_1 = aten.mul.Tensor(mul, dx)
    del sub_1, mul
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    mm = aten.mm.default(mul_1, weight)
    return mm, (x, mul_1)


def out_backward_weight(b, B, x, mul_1):
    """Backward of out for its weights (wgrad)."""
    # models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t_1 = aten.t.default(mul_1)
    mm_1 = aten.mm.default(t_1, x)
    sum_1 = aten.sum.dim_IntList(mul_1, [0], True)
    view = aten.view.default(sum_1, [3])
    return (mm_1, view)


def edge_0_1(b):
    """What stage 0 hands to stage 1 for a microbatch of b samples."""
    return (((b, 8), torch.float64),)


def stage1_forward(world, batch, k, from_0):
    b, B = batch.sizes[k], batch.size
    # layers_0: float64[b, 8]
    (layers_0,) = from_0
    y = batch.input("args[1]", k)
    saved = []
    layers = layers_0
    for i in range(1, 4):
        layers, kept = layers_forward(b, B, layers, *world.parameters(f"layers.{i}"))
        saved.append(kept)
    out, kept = out_forward(b, B, layers, y, *world.parameters("out"))
    saved.append(kept)
    return out, saved


def stage1_backward_input(world, batch, k, saved):
    b, B = batch.sizes[k], batch.size
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    stash = []
    d_out, kept = out_backward_input(b, B, one, *saved.pop(), *world.parameters("out"))
    stash.append(kept)
    d_layers = d_out
    for i in reversed(range(1, 4)):
        d_layers, kept = layers_backward_input(b, B, d_layers, *saved.pop(), *world.parameters(f"layers.{i}"))
        stash.append(kept)
    return (d_layers,), stash


def stage1_backward_weight(world, batch, k, stash):
    b, B = batch.sizes[k], batch.size
    grads = out_backward_weight(b, B, *stash.pop(0))
    world.accumulate("out", grads)
    for i in reversed(range(1, 4)):
        grads = layers_backward_weight(b, B, *stash.pop(0))
        world.accumulate(f"layers.{i}", grads)


def step(world, batch):
    """3 forwards, 3 backwards for inputs and 3 backwards for weights."""
    saved_1 = world.store()
    stash_1 = world.store()
    acts_0_1 = world.store()
    grads_1_0 = world.store()
    loss = {}
    acts_0_1[0] = world.recv(edge_0_1(batch.sizes[0]), stage=1, source=0, microbatch=0)
    with world.action("F", stage=1, microbatch=0):
        loss[0], saved_1[0] = stage1_forward(world, batch, 0, acts_0_1.pop(0))
    with world.action("I", stage=1, microbatch=0):
        grads_1_0[0], stash_1[0] = stage1_backward_input(world, batch, 0, saved_1.pop(0))
    acts_0_1[1] = world.recv(edge_0_1(batch.sizes[1]), stage=1, source=0, microbatch=1)
    world.send(grads_1_0.pop(0), stage=1, to=0, microbatch=0)
    with world.action("F", stage=1, microbatch=1):
        loss[1], saved_1[1] = stage1_forward(world, batch, 1, acts_0_1.pop(1))
    with world.action("I", stage=1, microbatch=1):
        grads_1_0[1], stash_1[1] = stage1_backward_input(world, batch, 1, saved_1.pop(1))
    world.send(grads_1_0.pop(1), stage=1, to=0, microbatch=1)
    with world.action("W", stage=1, microbatch=0):
        stage1_backward_weight(world, batch, 0, stash_1.pop(0))
    acts_0_1[2] = world.recv(edge_0_1(batch.sizes[2]), stage=1, source=0, microbatch=2)
    with world.action("F", stage=1, microbatch=2):
        loss[2], saved_1[2] = stage1_forward(world, batch, 2, acts_0_1.pop(2))
    with world.action("I", stage=1, microbatch=2):
        grads_1_0[2], stash_1[2] = stage1_backward_input(world, batch, 2, saved_1.pop(2))
    world.send(grads_1_0.pop(2), stage=1, to=0, microbatch=2)
    for k in range(1, 3):
        with world.action("W", stage=1, microbatch=k):
            stage1_backward_weight(world, batch, k, stash_1.pop(k))
    loss = world.total(list(loss.values()), shape=(), dtype=torch.float64)
    return {"loss": loss}
