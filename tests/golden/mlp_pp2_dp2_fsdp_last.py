"""Rank 3 of 4 (pp 1, dp 1): stage 1 of 2, layers.2 to out.

training, schedule 1f1b, 3 microbatches, placements *: fsdp
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 3, {'pp': 2, 'dp': 2}
PLACE = (0, 1)  # the pp rank of each stage
MICROBATCHES = 3
DEVICE = torch.device("cpu")  # the world's device when the program runs


def layers_forward(b, B, x, p0_weight, p0_bias):
    """Forward of layers.2 to layers.3."""
    # 0 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    t = aten.t.default(p0_weight)
    addmm = aten.addmm.default(p0_bias, x, t)
    del t
    # 1 | models.py:29  return F.mse_loss(self.out(self.layers(x)), y)
    tanh = aten.tanh.out(addmm, out=addmm)
    return tanh, (tanh, x)


def layers_backward(b, B, dx, tanh, x, p0_weight, p0_bias):
    """Backward of layers.2 to layers.3."""
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


def edge_0_1(b):
    """What stage 0 hands to stage 1 for a microbatch of b samples."""
    return (((b, 8), torch.float64),)


def stage1_forward(world, batch, k, from_0):
    b, B = batch.sizes[k], batch.size
    # layers_1: float64[b, 8], Shard(0) on dp
    (layers_1,) = from_0
    y = batch.input("args[1]", k)
    saved = []
    layers_2, kept = layers_forward(b, B, layers_1, *world.all_gather("layers.2", axis="dp", then="layers.3"))
    saved.append(kept)
    layers_3, kept = layers_forward(b, B, layers_2, *world.all_gather("layers.3", axis="dp", then="out"))
    saved.append(kept)
    out, kept = out_forward(b, B, layers_3, y, *world.all_gather("out", axis="dp"))
    saved.append(kept)
    return out, saved


def stage1_backward(world, batch, k, saved):
    b, B = batch.sizes[k], batch.size
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    d_out, grads = out_backward(b, B, one, *saved.pop(), *world.all_gather("out", axis="dp", then="layers.3"))
    world.reduce_scatter("out", grads, axis="dp")
    d_layers_3, grads = layers_backward(
        b, B, d_out, *saved.pop(), *world.all_gather("layers.3", axis="dp", then="layers.2"),
    )
    world.reduce_scatter("layers.3", grads, axis="dp")
    d_layers_2, grads = layers_backward(b, B, d_layers_3, *saved.pop(), *world.all_gather("layers.2", axis="dp"))
    world.reduce_scatter("layers.2", grads, axis="dp")
    return (d_layers_2,)


def step(world, batch):
    """3 times one forward and one backward."""
    saved_1 = world.store()
    acts_0_1 = world.store()
    grads_1_0 = world.store()
    loss = {}
    acts_0_1[0] = world.recv(edge_0_1(batch.sizes[0]), stage=1, source=0, microbatch=0)
    for k in range(2):
        with world.action("F", stage=1, microbatch=k):
            loss[k], saved_1[k] = stage1_forward(world, batch, k, acts_0_1.pop(k))
        with world.action("B", stage=1, microbatch=k):
            grads_1_0[k] = stage1_backward(world, batch, k, saved_1.pop(k))
        acts_0_1[k + 1] = world.recv(edge_0_1(batch.sizes[k + 1]), stage=1, source=0, microbatch=k + 1)
        world.send(grads_1_0.pop(k), stage=1, to=0, microbatch=k)
    with world.action("F", stage=1, microbatch=2):
        loss[2], saved_1[2] = stage1_forward(world, batch, 2, acts_0_1.pop(2))
    with world.action("B", stage=1, microbatch=2):
        grads_1_0[2] = stage1_backward(world, batch, 2, saved_1.pop(2))
    world.send(grads_1_0.pop(2), stage=1, to=0, microbatch=2)
    world.wait()  # until the gradients that are being reduced are there
    loss = world.total(list(loss.values()), shape=(), dtype=torch.float64)
    return {"loss": loss}
