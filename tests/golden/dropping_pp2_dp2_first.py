"""Rank 0 of 4 (pp 0, dp 0): stage 0 of 2, h.0 to h.1.

training, schedule 1f1b, 3 microbatches, placements *: ddp
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 0, {'pp': 2, 'dp': 2}
PLACE = (0, 1)  # the pp rank of each stage
MICROBATCHES = 3
DEVICE = torch.device("cpu")  # the world's device when the program runs


def h_0_forward(b, B, x, drop_draw, draw, lin_weight, lin_bias):
    """Forward of h.0."""
    # lin | random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    t = aten.t.default(lin_weight)
    addmm = aten.addmm.default(lin_bias, x, t)
    del t
    # drop | random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    bernoulli = torch.ops.autopart.bernoulli.default(drop_draw, 0.7, [b, 8], 0, device=DEVICE)
    to_copy = aten._to_copy.default(bernoulli, dtype=torch.float64)
    mul = aten.mul.out(to_copy, 1.4285714285714286, out=to_copy)
    mul_1 = aten.mul.out(addmm, mul, out=addmm)
    del to_copy, mul, addmm
    # random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    tanh = aten.tanh.out(mul_1, out=mul_1)
    bernoulli_1 = torch.ops.autopart.bernoulli.default(draw, 0.8, [b, 8], 0, device=DEVICE)
    to_copy_1 = aten._to_copy.default(bernoulli_1, dtype=torch.float64)
    mul_2 = aten.mul.out(to_copy_1, 1.25, out=to_copy_1)
    mul_3 = aten.mul.out(tanh, mul_2, out=mul_2)
    return mul_3, (bernoulli_1, tanh, bernoulli, x)


def h_0_backward(b, B, dx, bernoulli_1, tanh, bernoulli, x, lin_weight, lin_bias):
    """Backward of h.0."""
    # random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    dropout_backward = aten.native_dropout_backward.default(dx, bernoulli_1, 1.25)
    tanh_backward = aten.tanh_backward.grad_input(dropout_backward, tanh, grad_input=dropout_backward)
    del dropout_backward
    # drop | random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    dropout_backward_1 = aten.native_dropout_backward.default(tanh_backward, bernoulli, 1.4285714285714286)
    del tanh_backward
    # lin | random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    t_1 = aten.t.default(dropout_backward_1)
    mm = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(dropout_backward_1, [0], True)
    view = aten.view.default(sum, [8])
    return (mm, view)


def h_forward(b, B, x, drop_draw, draw, lin_weight, lin_bias):
    """Forward of h.1."""
    # lin | random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    t = aten.t.default(lin_weight)
    addmm = aten.addmm.default(lin_bias, x, t)
    del t
    # drop | random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    bernoulli = torch.ops.autopart.bernoulli.default(drop_draw, 0.7, [b, 8], 0, device=DEVICE)
    to_copy = aten._to_copy.default(bernoulli, dtype=torch.float64)
    mul = aten.mul.out(to_copy, 1.4285714285714286, out=to_copy)
    mul_1 = aten.mul.out(addmm, mul, out=addmm)
    del to_copy, mul, addmm
    # random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    tanh = aten.tanh.out(mul_1, out=mul_1)
    bernoulli_1 = torch.ops.autopart.bernoulli.default(draw, 0.8, [b, 8], 0, device=DEVICE)
    to_copy_1 = aten._to_copy.default(bernoulli_1, dtype=torch.float64)
    mul_2 = aten.mul.out(to_copy_1, 1.25, out=to_copy_1)
    mul_3 = aten.mul.out(tanh, mul_2, out=mul_2)
    return mul_3, (bernoulli_1, tanh, bernoulli, x)


def h_backward(b, B, dx, bernoulli_1, tanh, bernoulli, x, lin_weight, lin_bias):
    """Backward of h.1."""
    # random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    dropout_backward = aten.native_dropout_backward.default(dx, bernoulli_1, 1.25)
    tanh_backward = aten.tanh_backward.grad_input(dropout_backward, tanh, grad_input=dropout_backward)
    del dropout_backward
    # drop | random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    dropout_backward_1 = aten.native_dropout_backward.default(tanh_backward, bernoulli, 1.4285714285714286)
    del tanh_backward
    # lin | random_models.py:24  return F.dropout(self.drop(self.lin(x)).tanh(), 0.2, self.training)
    mm = aten.mm.default(dropout_backward_1, lin_weight)
    t_1 = aten.t.default(dropout_backward_1)
    mm_1 = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(dropout_backward_1, [0], True)
    view = aten.view.default(sum, [8])
    return mm, (mm_1, view)


def edge_1_0(b):
    """What stage 1 hands to stage 0 for a microbatch of b samples."""
    return (((b, 8), torch.float64),)


def stage0_forward(world, batch, k):
    b, B = batch.sizes[k], batch.size
    x = batch.input("args[0]", k)
    saved = []
    h_0, kept = h_0_forward(b, B, x, batch.random("h.0.drop#0", k), batch.random("h.0#0", k), *world.parameters("h.0"))
    saved.append(kept)
    h_1, kept = h_forward(b, B, h_0, batch.random("h.1.drop#0", k), batch.random("h.1#0", k), *world.parameters("h.1"))
    saved.append(kept)
    return (h_1,), saved


def stage0_backward(world, batch, k, saved, from_1):
    b, B = batch.sizes[k], batch.size
    # d_h_1: float64[b, 8], Shard(0) on dp
    (d_h_1,) = from_1
    last = k == 2  # then gradients are complete, and each begins to be reduced
    d_h_1_v2, grads = h_backward(b, B, d_h_1, *saved.pop(), *world.parameters("h.1"))
    world.accumulate("h.1", grads)
    grads = h_0_backward(b, B, d_h_1_v2, *saved.pop(), *world.parameters("h.0"))
    world.accumulate("h.0", grads)
    if last:
        world.all_reduce(("h.1", "h.0"), axis="dp")


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
