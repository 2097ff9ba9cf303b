"""Rank 1 of 2 (dp 1): stage 0 of 1, encoder.0 to output.

training, schedule 1f1b, 1 microbatches, placements *: zero1
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 1, {'dp': 2}
PLACE = (0,)  # the pp rank of each stage
MICROBATCHES = 1
DEVICE = torch.device("cpu")  # the world's device when the program runs


def prologue(B, mask):
    """What depends on the whole batch's inputs alone, computed before its first microbatch."""
    # models.py:108  loss = ((out - labels) ** 2 * mask).sum() / mask.sum()
    sum_2 = aten.sum.default(mask)
    return sum_2


def encoder_0_forward(b, B, x, weight, bias):
    """Forward of encoder.0."""
    # models.py:105  out = self.decoder(self.encoder(x))
    t = aten.t.default(weight)
    addmm = aten.addmm.default(bias, x, t)
    return addmm


def encoder_1_forward(b, B, x):
    """Forward of encoder.1."""
    # models.py:105  out = self.decoder(self.encoder(x))
    relu = aten.relu.default(x)
    return relu


def encoder_2_forward(b, B, x, weight, bias):
    """Forward of encoder.2."""
    # models.py:105  out = self.decoder(self.encoder(x))
    t = aten.t.default(weight)
    addmm = aten.addmm.default(bias, x, t)
    return addmm


def decoder_0_forward(b, B, x, weight, bias):
    """Forward of decoder.0."""
    # models.py:105  out = self.decoder(self.encoder(x))
    t = aten.t.default(weight)
    addmm = aten.addmm.default(bias, x, t)
    return addmm, (x,)


def decoder_0_backward(b, B, dx, x, weight, bias):
    """Backward of decoder.0."""
    # models.py:105  out = self.decoder(self.encoder(x))
    t_1 = aten.t.default(dx)
    mm = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(dx, [0], True)
    view = aten.view.default(sum, [16])
    return (mm, view)


def decoder_1_forward(b, B, x):
    """Forward of decoder.1."""
    # models.py:105  out = self.decoder(self.encoder(x))
    tanh = aten.tanh.default(x)
    return tanh, (tanh,)


def decoder_1_backward(b, B, dx, tanh):
    """Backward of decoder.1."""
    # models.py:105  out = self.decoder(self.encoder(x))
    tanh_backward = aten.tanh_backward.default(dx, tanh)
    return tanh_backward


def decoder_2_forward(b, B, x, weight, bias):
    """Forward of decoder.2."""
    # models.py:105  out = self.decoder(self.encoder(x))
    t = aten.t.default(weight)
    addmm = aten.addmm.default(bias, x, t)
    return addmm, (x,)


def decoder_2_backward(b, B, dx, x, weight, bias):
    """Backward of decoder.2."""
    # models.py:105  out = self.decoder(self.encoder(x))
    mm = aten.mm.default(dx, weight)
    t_1 = aten.t.default(dx)
    mm_1 = aten.mm.default(t_1, x)
    sum = aten.sum.dim_IntList(dx, [0], True)
    reshape = aten.reshape.default(sum, [4])
    return mm, (mm_1, reshape)


def output_forward(b, B, x, labels, mask, sum_2):
    """Forward of output."""
    # models.py:108  loss = ((out - labels) ** 2 * mask).sum() / mask.sum()
    sub = aten.sub.Tensor(x, labels)
    pow = aten.pow.Tensor_Scalar(sub, 2)
    mul = aten.mul.Tensor(pow, mask)
    sum = aten.sum.default(mul)
    div = aten.div.Tensor(sum, sum_2)
    return div, (mask, sub)


def output_backward(b, B, dx, mask, sub, sum_2):
    """Backward of output."""
    # models.py:108  loss = ((out - labels) ** 2 * mask).sum() / mask.sum()
    div_1 = aten.div.Tensor(dx, sum_2)
    expand = aten.expand.default(div_1, [b, 4])
    mul_1 = aten.mul.Tensor(expand, mask)
    pow_1 = aten.pow.Tensor_Scalar(sub, 1.0)
    mul_2 = aten.mul.Scalar(pow_1, 2.0)
    mul_3 = aten.mul.Tensor(mul_1, mul_2)
    return mul_3


def stage0_forward(world, batch, k, sum_2):
    b, B = batch.sizes[k], batch.size
    x = batch.input("args[0]", k)
    labels = batch.input("kwargs['labels']", k)
    mask = batch.input("kwargs['mask']", k)
    saved = []
    encoder_0 = encoder_0_forward(b, B, x, *world.parameters("encoder.0"))
    encoder_1 = encoder_1_forward(b, B, encoder_0)
    encoder_2 = encoder_2_forward(b, B, encoder_1, *world.parameters("encoder.2"))
    decoder_0, kept = decoder_0_forward(b, B, encoder_2, *world.parameters("decoder.0"))
    saved.append(kept)
    decoder_1, kept = decoder_1_forward(b, B, decoder_0)
    saved.append(kept)
    decoder_2, kept = decoder_2_forward(b, B, decoder_1, *world.parameters("decoder.2"))
    saved.append(kept)
    output, kept = output_forward(b, B, decoder_2, labels, mask, sum_2)
    saved.append(kept)
    return output, decoder_2, saved


def stage0_backward(world, batch, k, saved, sum_2):
    b, B = batch.sizes[k], batch.size
    last = k == 0  # then gradients are complete, and each begins to be reduced
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    d_output = output_backward(b, B, one, *saved.pop(), sum_2)
    d_decoder_2, grads = decoder_2_backward(b, B, d_output, *saved.pop(), *world.parameters("decoder.2"))
    world.accumulate("decoder.2", grads)
    d_decoder_1 = decoder_1_backward(b, B, d_decoder_2, *saved.pop())
    grads = decoder_0_backward(b, B, d_decoder_1, *saved.pop(), *world.parameters("decoder.0"))
    world.accumulate("decoder.0", grads)
    if last:
        world.reduce_scatter(("decoder.2", "decoder.0"), axis="dp")


def step(world, batch):
    """1 forward, then 1 backward."""
    sum_2 = prologue(batch.size, batch.whole("kwargs['mask']"))
    # Parameters that the last optimizer step updated in parts are made whole again.
    world.regather("decoder.0", axis="dp")
    world.regather("decoder.2", axis="dp")
    saved_0 = world.store()
    loss = {}
    output_1 = {}
    with world.action("F", stage=0, microbatch=0):
        loss[0], output_1[0], saved_0[0] = stage0_forward(world, batch, 0, sum_2)
    with world.action("B", stage=0, microbatch=0):
        stage0_backward(world, batch, 0, saved_0.pop(0), sum_2)
    world.wait()  # until the gradients that are being reduced are there
    loss = world.total(list(loss.values()), shape=(), dtype=torch.float64)
    output_1 = world.joined(output_1, dim=0)
    return {"loss": loss, "output_1": output_1}
