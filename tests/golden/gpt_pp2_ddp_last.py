"""Rank 1 of 2 (pp 1): stage 1 of 2, blocks.4 to norm.

training, schedule 1f1b, 6 microbatches, placements *: ddp
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 1, {'pp': 2}
PLACE = (0, 1)  # the pp rank of each stage
MICROBATCHES = 6
DEVICE = torch.device("cpu")  # the world's device when the program runs


def prologue(B, labels):
    """What depends on the whole batch's inputs alone, computed before its first microbatch."""
    # models.py:90  return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    view_98_whole = aten.view.default(labels, [8 * B])
    ne_whole = aten.ne.Scalar(view_98_whole, -100)
    sum_1_whole = aten.sum.default(ne_whole)
    _to_copy = aten._to_copy.default(sum_1_whole, dtype=torch.float64)
    return _to_copy


def blocks_4_forward(
    b, B, x, norm1_weight, norm1_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, norm2_weight, norm2_bias,
    up_weight, up_bias, down_weight, down_bias,
):
    """Forward of blocks.4."""
    # models.py:85  x = x + kept.pop()
    add = aten.add.Tensor(x, x)
    # norm1 | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    layer_norm, layer_norm_1, layer_norm_2 = aten.native_layer_norm.default(add, [16], norm1_weight, norm1_bias, 1e-05)
    # qkv | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    view = aten.view.default(layer_norm, [8 * b, 16])
    t = aten.t.default(qkv_weight)
    addmm = aten.addmm.default(qkv_bias, view, t)
    view_1 = aten.view.default(addmm, [b, 8, 48])
    del layer_norm, t, addmm
    # models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    split, split_1, split_2 = aten.split.Tensor(view_1, 16, 2)
    del view_1
    # models.py:48  t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
    view_2 = aten.view.default(split, [b, 8, 4, 4])
    transpose = aten.transpose.int(view_2, 1, 2)
    view_3 = aten.view.default(split_1, [b, 8, 4, 4])
    transpose_1 = aten.transpose.int(view_3, 1, 2)
    view_4 = aten.view.default(split_2, [b, 8, 4, 4])
    transpose_2 = aten.transpose.int(view_4, 1, 2)
    del split, view_2, split_1, view_3, split_2, view_4
    # models.py:51  y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attention, attention_1 = aten._scaled_dot_product_flash_attention_for_cpu.default(
        transpose, transpose_1, transpose_2, 0.0, True,
    )
    # models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    transpose_3 = aten.transpose.int(attention, 1, 2)
    reshape = aten.reshape.default(transpose_3, [b, 8, 16])
    del transpose_3
    # proj | models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    reshape_1 = aten.reshape.default(reshape, [8 * b, 16])
    t_1 = aten.t.default(proj_weight)
    addmm_1 = aten.addmm.default(proj_bias, reshape_1, t_1)
    view_5 = aten.view.default(addmm_1, [b, 8, 16])
    del reshape, t_1, addmm_1
    # models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    add_1 = aten.add.out(add, view_5, out=view_5)
    del view_5
    # norm2 | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    layer_norm_3, layer_norm_4, layer_norm_5 = aten.native_layer_norm.default(
        add_1, [16], norm2_weight, norm2_bias, 1e-05,
    )
    # up | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_6 = aten.view.default(layer_norm_3, [8 * b, 16])
    t_2 = aten.t.default(up_weight)
    addmm_2 = aten.addmm.default(up_bias, view_6, t_2)
    view_7 = aten.view.default(addmm_2, [b, 8, 64])
    del layer_norm_3, t_2, addmm_2
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    gelu = aten.gelu.default(view_7)
    # down | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_8 = aten.view.default(gelu, [8 * b, 64])
    t_3 = aten.t.default(down_weight)
    addmm_3 = aten.addmm.default(down_bias, view_8, t_3)
    view_9 = aten.view.default(addmm_3, [b, 8, 16])
    del gelu, t_3, addmm_3
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    add_2 = aten.add.out(add_1, view_9, out=view_9)
    return (
        add_2, (view_8, view_7, view_6, add_1, layer_norm_4, layer_norm_5, reshape_1, transpose, transpose_1,
        transpose_2, attention, attention_1, view, add, layer_norm_1, layer_norm_2),
    )


def blocks_4_backward(
    b, B, dx, view_8, view_7, view_6, add_1, layer_norm_4, layer_norm_5, reshape_1, transpose, transpose_1,
    transpose_2, attention, attention_1, view, add, layer_norm_1, layer_norm_2, norm1_weight, norm1_bias,
    qkv_weight, qkv_bias, proj_weight, proj_bias, norm2_weight, norm2_bias, up_weight, up_bias, down_weight,
    down_bias,
):
    """Backward of blocks.4."""
    # down | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_10 = aten.view.default(dx, [8 * b, 16])
    mm = aten.mm.default(view_10, down_weight)
    t_4 = aten.t.default(view_10)
    mm_1 = aten.mm.default(t_4, view_8)
    sum = aten.sum.dim_IntList(view_10, [0], True)
    view_11 = aten.view.default(sum, [16])
    view_12 = aten.view.default(mm, [b, 8, 64])
    del view_10, mm, t_4, sum
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    gelu_backward = aten.gelu_backward.grad_input(view_12, view_7, grad_input=view_12)
    del view_12
    # up | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_13 = aten.view.default(gelu_backward, [8 * b, 64])
    mm_2 = aten.mm.default(view_13, up_weight)
    t_5 = aten.t.default(view_13)
    mm_3 = aten.mm.default(t_5, view_6)
    sum_1 = aten.sum.dim_IntList(view_13, [0], True)
    view_14 = aten.view.default(sum_1, [64])
    view_15 = aten.view.default(mm_2, [b, 8, 16])
    del gelu_backward, view_13, mm_2, t_5, sum_1
    # norm2 | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    layer_norm_backward, layer_norm_backward_1, layer_norm_backward_2 = aten.native_layer_norm_backward.default(
        view_15, add_1, [16], layer_norm_4, layer_norm_5, norm2_weight, norm2_bias, [True, True, True],
    )
    del view_15
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    add_3 = aten.add.out(dx, layer_norm_backward, out=layer_norm_backward)
    del layer_norm_backward
    # proj | models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    view_16 = aten.view.default(add_3, [8 * b, 16])
    mm_4 = aten.mm.default(view_16, proj_weight)
    t_6 = aten.t.default(view_16)
    mm_5 = aten.mm.default(t_6, reshape_1)
    sum_2 = aten.sum.dim_IntList(view_16, [0], True)
    view_17 = aten.view.default(sum_2, [16])
    view_18 = aten.view.default(mm_4, [b, 8, 16])
    del view_16, mm_4, t_6, sum_2
    # models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    view_19 = aten.view.default(view_18, [b, 8, 4, 4])
    transpose_4 = aten.transpose.int(view_19, 1, 2)
    del view_18, view_19
    # models.py:51  y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attention_backward, attention_backward_1, attention_backward_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        transpose_4, transpose, transpose_1, transpose_2, attention, attention_1, 0.0, True,
    )
    del transpose_4
    # models.py:48  t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
    transpose_5 = aten.transpose.int(attention_backward_2, 1, 2)
    reshape_2 = aten.reshape.default(transpose_5, [b, 8, 16])
    transpose_6 = aten.transpose.int(attention_backward_1, 1, 2)
    reshape_3 = aten.reshape.default(transpose_6, [b, 8, 16])
    transpose_7 = aten.transpose.int(attention_backward, 1, 2)
    reshape_4 = aten.reshape.default(transpose_7, [b, 8, 16])
    del attention_backward_2, transpose_5, attention_backward_1, transpose_6, attention_backward, transpose_7
    # models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    cat = aten.cat.default([reshape_4, reshape_3, reshape_2], 2)
    del reshape_4, reshape_3, reshape_2
    # qkv | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    reshape_5 = aten.reshape.default(cat, [8 * b, 48])
    mm_6 = aten.mm.default(reshape_5, qkv_weight)
    t_7 = aten.t.default(reshape_5)
    mm_7 = aten.mm.default(t_7, view)
    sum_3 = aten.sum.dim_IntList(reshape_5, [0], True)
    reshape_6 = aten.reshape.default(sum_3, [48])
    view_20 = aten.view.default(mm_6, [b, 8, 16])
    del cat, reshape_5, mm_6, t_7, sum_3
    # norm1 | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    layer_norm_backward_3, layer_norm_backward_4, layer_norm_backward_5 = aten.native_layer_norm_backward.default(
        view_20, add, [16], layer_norm_1, layer_norm_2, norm1_weight, norm1_bias, [True, True, True],
    )
    del view_20
    # models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    add_4 = aten.add.out(add_3, layer_norm_backward_3, out=add_3)
    return (
        add_4, (layer_norm_backward_4, layer_norm_backward_5, mm_7, reshape_6, mm_5, view_17,
        layer_norm_backward_1, layer_norm_backward_2, mm_3, view_14, mm_1, view_11),
    )


def blocks_v2_forward(
    b, B, x, x_1, norm1_weight, norm1_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, norm2_weight,
    norm2_bias, up_weight, up_bias, down_weight, down_bias,
):
    """Forward of blocks.5 to blocks.7."""
    # models.py:85  x = x + kept.pop()
    add = aten.add.Tensor(x, x_1)
    # norm1 | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    layer_norm, layer_norm_1, layer_norm_2 = aten.native_layer_norm.default(add, [16], norm1_weight, norm1_bias, 1e-05)
    # qkv | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    view = aten.view.default(layer_norm, [8 * b, 16])
    t = aten.t.default(qkv_weight)
    addmm = aten.addmm.default(qkv_bias, view, t)
    view_1 = aten.view.default(addmm, [b, 8, 48])
    del layer_norm, t, addmm
    # models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    split, split_1, split_2 = aten.split.Tensor(view_1, 16, 2)
    del view_1
    # models.py:48  t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
    view_2 = aten.view.default(split, [b, 8, 4, 4])
    transpose = aten.transpose.int(view_2, 1, 2)
    view_3 = aten.view.default(split_1, [b, 8, 4, 4])
    transpose_1 = aten.transpose.int(view_3, 1, 2)
    view_4 = aten.view.default(split_2, [b, 8, 4, 4])
    transpose_2 = aten.transpose.int(view_4, 1, 2)
    del split, view_2, split_1, view_3, split_2, view_4
    # models.py:51  y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attention, attention_1 = aten._scaled_dot_product_flash_attention_for_cpu.default(
        transpose, transpose_1, transpose_2, 0.0, True,
    )
    # models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    transpose_3 = aten.transpose.int(attention, 1, 2)
    reshape = aten.reshape.default(transpose_3, [b, 8, 16])
    del transpose_3
    # proj | models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    reshape_1 = aten.reshape.default(reshape, [8 * b, 16])
    t_1 = aten.t.default(proj_weight)
    addmm_1 = aten.addmm.default(proj_bias, reshape_1, t_1)
    view_5 = aten.view.default(addmm_1, [b, 8, 16])
    del reshape, t_1, addmm_1
    # models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    add_1 = aten.add.out(add, view_5, out=view_5)
    del view_5
    # norm2 | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    layer_norm_3, layer_norm_4, layer_norm_5 = aten.native_layer_norm.default(
        add_1, [16], norm2_weight, norm2_bias, 1e-05,
    )
    # up | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_6 = aten.view.default(layer_norm_3, [8 * b, 16])
    t_2 = aten.t.default(up_weight)
    addmm_2 = aten.addmm.default(up_bias, view_6, t_2)
    view_7 = aten.view.default(addmm_2, [b, 8, 64])
    del layer_norm_3, t_2, addmm_2
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    gelu = aten.gelu.default(view_7)
    # down | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_8 = aten.view.default(gelu, [8 * b, 64])
    t_3 = aten.t.default(down_weight)
    addmm_3 = aten.addmm.default(down_bias, view_8, t_3)
    view_9 = aten.view.default(addmm_3, [b, 8, 16])
    del gelu, t_3, addmm_3
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    add_2 = aten.add.out(add_1, view_9, out=view_9)
    return (
        add_2, (view_8, view_7, view_6, add_1, layer_norm_4, layer_norm_5, reshape_1, transpose, transpose_1,
        transpose_2, attention, attention_1, view, add, layer_norm_1, layer_norm_2),
    )


def blocks_v2_backward(
    b, B, dx, view_8, view_7, view_6, add_1, layer_norm_4, layer_norm_5, reshape_1, transpose, transpose_1,
    transpose_2, attention, attention_1, view, add, layer_norm_1, layer_norm_2, norm1_weight, norm1_bias,
    qkv_weight, qkv_bias, proj_weight, proj_bias, norm2_weight, norm2_bias, up_weight, up_bias, down_weight,
    down_bias,
):
    """Backward of blocks.5 to blocks.7."""
    # down | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_10 = aten.view.default(dx, [8 * b, 16])
    mm = aten.mm.default(view_10, down_weight)
    t_4 = aten.t.default(view_10)
    mm_1 = aten.mm.default(t_4, view_8)
    sum = aten.sum.dim_IntList(view_10, [0], True)
    view_11 = aten.view.default(sum, [16])
    view_12 = aten.view.default(mm, [b, 8, 64])
    del view_10, mm, t_4, sum
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    gelu_backward = aten.gelu_backward.grad_input(view_12, view_7, grad_input=view_12)
    del view_12
    # up | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_13 = aten.view.default(gelu_backward, [8 * b, 64])
    mm_2 = aten.mm.default(view_13, up_weight)
    t_5 = aten.t.default(view_13)
    mm_3 = aten.mm.default(t_5, view_6)
    sum_1 = aten.sum.dim_IntList(view_13, [0], True)
    view_14 = aten.view.default(sum_1, [64])
    view_15 = aten.view.default(mm_2, [b, 8, 16])
    del gelu_backward, view_13, mm_2, t_5, sum_1
    # norm2 | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    layer_norm_backward, layer_norm_backward_1, layer_norm_backward_2 = aten.native_layer_norm_backward.default(
        view_15, add_1, [16], layer_norm_4, layer_norm_5, norm2_weight, norm2_bias, [True, True, True],
    )
    del view_15
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    add_3 = aten.add.out(dx, layer_norm_backward, out=layer_norm_backward)
    del layer_norm_backward
    # proj | models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    view_16 = aten.view.default(add_3, [8 * b, 16])
    mm_4 = aten.mm.default(view_16, proj_weight)
    t_6 = aten.t.default(view_16)
    mm_5 = aten.mm.default(t_6, reshape_1)
    sum_2 = aten.sum.dim_IntList(view_16, [0], True)
    view_17 = aten.view.default(sum_2, [16])
    view_18 = aten.view.default(mm_4, [b, 8, 16])
    del view_16, mm_4, t_6, sum_2
    # models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    view_19 = aten.view.default(view_18, [b, 8, 4, 4])
    transpose_4 = aten.transpose.int(view_19, 1, 2)
    del view_18, view_19
    # models.py:51  y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attention_backward, attention_backward_1, attention_backward_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        transpose_4, transpose, transpose_1, transpose_2, attention, attention_1, 0.0, True,
    )
    del transpose_4
    # models.py:48  t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
    transpose_5 = aten.transpose.int(attention_backward_2, 1, 2)
    reshape_2 = aten.reshape.default(transpose_5, [b, 8, 16])
    transpose_6 = aten.transpose.int(attention_backward_1, 1, 2)
    reshape_3 = aten.reshape.default(transpose_6, [b, 8, 16])
    transpose_7 = aten.transpose.int(attention_backward, 1, 2)
    reshape_4 = aten.reshape.default(transpose_7, [b, 8, 16])
    del attention_backward_2, transpose_5, attention_backward_1, transpose_6, attention_backward, transpose_7
    # models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    cat = aten.cat.default([reshape_4, reshape_3, reshape_2], 2)
    del reshape_4, reshape_3, reshape_2
    # qkv | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    reshape_5 = aten.reshape.default(cat, [8 * b, 48])
    mm_6 = aten.mm.default(reshape_5, qkv_weight)
    t_7 = aten.t.default(reshape_5)
    mm_7 = aten.mm.default(t_7, view)
    sum_3 = aten.sum.dim_IntList(reshape_5, [0], True)
    reshape_6 = aten.reshape.default(sum_3, [48])
    view_20 = aten.view.default(mm_6, [b, 8, 16])
    del cat, reshape_5, mm_6, t_7, sum_3
    # norm1 | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    layer_norm_backward_3, layer_norm_backward_4, layer_norm_backward_5 = aten.native_layer_norm_backward.default(
        view_20, add, [16], layer_norm_1, layer_norm_2, norm1_weight, norm1_bias, [True, True, True],
    )
    del view_20
    # models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    add_4 = aten.add.out(add_3, layer_norm_backward_3, out=add_3)
    return (
        add_4, (layer_norm_backward_4, layer_norm_backward_5, mm_7, reshape_6, mm_5, view_17,
        layer_norm_backward_1, layer_norm_backward_2, mm_3, view_14, mm_1, view_11),
    )


def norm_forward(b, B, x, labels, to_copy, weight, bias, wte_weight):
    """Forward of norm."""
    # models.py:89  logits = self.head(self.norm(x))
    layer_norm, layer_norm_1, layer_norm_2 = aten.native_layer_norm.default(x, [16], weight, bias, 1e-05)
    # head | models.py:89  logits = self.head(self.norm(x))
    t = aten.t.default(wte_weight)
    view = aten.view.default(layer_norm, [8 * b, 16])
    mm = aten.mm.default(view, t)
    unsafe_view = aten._unsafe_view.default(mm, [b, 8, 32])
    del t, layer_norm, mm
    # models.py:90  return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    view_1 = aten.view.default(unsafe_view, [8 * b, 32])
    view_2 = aten.view.default(labels, [8 * b])
    log_softmax = aten._log_softmax.out(view_1, 1, False, out=view_1)
    nll_loss_forward, _ = aten.nll_loss_forward.default(log_softmax, view_2, None, 2, -100)
    div = aten.div.Tensor(nll_loss_forward, to_copy)
    return div, (log_softmax, view_2, view, x, layer_norm_1, layer_norm_2)


def norm_backward(
    b, B, dx, log_softmax, view_2, view, x, layer_norm_1, layer_norm_2, to_copy, weight, bias, wte_weight,
):
    """Backward of norm."""
    # models.py:90  return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    div_1 = aten.div.Tensor(dx, to_copy)
    nll_loss_backward = aten.nll_loss_backward.default(div_1, log_softmax, view_2, None, 2, -100, to_copy)
    log_softmax_backward_data = aten._log_softmax_backward_data.out(
        nll_loss_backward, log_softmax, 1, torch.float64, out=nll_loss_backward,
    )
    view_3 = aten.view.default(log_softmax_backward_data, [b, 8, 32])
    del div_1, nll_loss_backward, log_softmax_backward_data
    # head | models.py:89  logits = self.head(self.norm(x))
    view_4 = aten.view.default(view_3, [8 * b, 32])
    t_1 = aten.t.default(view_4)
    mm_1 = aten.mm.default(t_1, view)
    mm_2 = aten.mm.default(view_4, wte_weight)
    view_5 = aten.view.default(mm_2, [b, 8, 16])
    del view_3, view_4, t_1, mm_2
    # models.py:89  logits = self.head(self.norm(x))
    layer_norm_backward, layer_norm_backward_1, layer_norm_backward_2 = aten.native_layer_norm_backward.default(
        view_5, x, [16], layer_norm_1, layer_norm_2, weight, bias, [True, True, True],
    )
    return layer_norm_backward, (layer_norm_backward_1, layer_norm_backward_2), (mm_1,)


def edge_0_1(b):
    """What stage 0 hands to stage 1 for a microbatch of b samples."""
    return (
        ((b, 8, 16), torch.float64), ((b, 8, 16), torch.float64), ((b, 8, 16), torch.float64),
        ((b, 8, 16), torch.float64),
    )


def stage1_forward(world, batch, k, from_0, _to_copy):
    b, B = batch.sizes[k], batch.size
    # blocks_3: float64[b, 8, 16]
    # blocks_2: float64[b, 8, 16]
    # blocks_1: float64[b, 8, 16]
    # blocks_0: float64[b, 8, 16]
    (blocks_3, blocks_2, blocks_1, blocks_0) = from_0
    labels = batch.input("args[1]", k)
    saved = []
    blocks_4, kept = blocks_4_forward(b, B, blocks_3, *world.parameters("blocks.4"))
    saved.append(kept)
    blocks = blocks_4
    each = (blocks_2, blocks_1, blocks_0)
    for i in range(5, 8):
        blocks, kept = blocks_v2_forward(b, B, blocks, each[i - 5], *world.parameters(f"blocks.{i}"))
        saved.append(kept)
    norm, kept = norm_forward(
        b, B, blocks, labels, _to_copy, *world.parameters("norm"), *world.parameters("wte.weight"),
    )
    saved.append(kept)
    return norm, saved


def stage1_backward(world, batch, k, saved, _to_copy):
    b, B = batch.sizes[k], batch.size
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    d_norm, grads_0, grads_1 = norm_backward(
        b, B, one, *saved.pop(), _to_copy, *world.parameters("norm"), *world.parameters("wte.weight"),
    )
    world.accumulate("norm", grads_0)
    world.accumulate("wte.weight", grads_1)
    d_blocks = d_norm
    all_d_blocks = []
    for i in reversed(range(5, 8)):
        d_blocks, grads = blocks_v2_backward(b, B, d_blocks, *saved.pop(), *world.parameters(f"blocks.{i}"))
        world.accumulate(f"blocks.{i}", grads)
        all_d_blocks.append(d_blocks)
    d_blocks_4, grads = blocks_4_backward(b, B, all_d_blocks[2], *saved.pop(), *world.parameters("blocks.4"))
    world.accumulate("blocks.4", grads)
    return (all_d_blocks[0], all_d_blocks[1], all_d_blocks[2], d_blocks_4)


def step(world, batch):
    """6 times one forward and one backward."""
    _to_copy = prologue(batch.size, batch.whole("args[1]"))
    saved_1 = world.store()
    acts_0_1 = world.store()
    grads_1_0 = world.store()
    loss = {}
    acts_0_1[0] = world.recv(edge_0_1(batch.sizes[0]), stage=1, source=0, microbatch=0)
    for k in range(5):
        with world.action("F", stage=1, microbatch=k):
            loss[k], saved_1[k] = stage1_forward(world, batch, k, acts_0_1.pop(k), _to_copy)
        with world.action("B", stage=1, microbatch=k):
            grads_1_0[k] = stage1_backward(world, batch, k, saved_1.pop(k), _to_copy)
        acts_0_1[k + 1] = world.recv(edge_0_1(batch.sizes[k + 1]), stage=1, source=0, microbatch=k + 1)
        world.send(grads_1_0.pop(k), stage=1, to=0, microbatch=k)
    with world.action("F", stage=1, microbatch=5):
        loss[5], saved_1[5] = stage1_forward(world, batch, 5, acts_0_1.pop(5), _to_copy)
    with world.action("B", stage=1, microbatch=5):
        grads_1_0[5] = stage1_backward(world, batch, 5, saved_1.pop(5), _to_copy)
    world.send(grads_1_0.pop(5), stage=1, to=0, microbatch=5)
    # Parameters that several stages use have one gradient, the sum of theirs.
    world.all_reduce("wte.weight", axis="pp", stages=(0, 1))
    world.wait()
    loss = world.total(list(loss.values()), shape=(), dtype=torch.float64)
    return {"loss": loss}
