def blocks_recomputed_backward(
    b, B, dx, x, norm1_weight, norm1_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, norm2_weight,
    norm2_bias, up_weight, up_bias, down_weight, down_bias,
):
    """Backward of blocks.0."""
    # recomputed
    # norm1 | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    layer_norm, layer_norm_1, layer_norm_2 = aten.native_layer_norm.default(x, [16], norm1_weight, norm1_bias, 1e-05)
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
    add = aten.add.out(x, view_5, out=view_5)
    del view_5
    # norm2 | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    layer_norm_3, layer_norm_4, layer_norm_5 = aten.native_layer_norm.default(
        add, [16], norm2_weight, norm2_bias, 1e-05,
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
    del gelu
    # backward
    # down | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_10 = aten.view.default(dx, [8 * b, 16])
    mm = aten.mm.default(view_10, down_weight)
    t_4 = aten.t.default(view_10)
    mm_1 = aten.mm.default(t_4, view_8)
    sum = aten.sum.dim_IntList(view_10, [0], True)
    view_11 = aten.view.default(sum, [16])
    view_12 = aten.view.default(mm, [b, 8, 64])
    del view_10, mm, t_4, view_8, sum
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    gelu_backward = aten.gelu_backward.grad_input(view_12, view_7, grad_input=view_12)
    del view_12, view_7
    # up | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    view_13 = aten.view.default(gelu_backward, [8 * b, 64])
    mm_2 = aten.mm.default(view_13, up_weight)
    t_5 = aten.t.default(view_13)
    mm_3 = aten.mm.default(t_5, view_6)
    sum_1 = aten.sum.dim_IntList(view_13, [0], True)
    view_14 = aten.view.default(sum_1, [64])
    view_15 = aten.view.default(mm_2, [b, 8, 16])
    del gelu_backward, view_13, mm_2, t_5, view_6, sum_1
    # norm2 | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    layer_norm_backward, layer_norm_backward_1, layer_norm_backward_2 = aten.native_layer_norm_backward.default(
        view_15, add, [16], layer_norm_4, layer_norm_5, norm2_weight, norm2_bias, [True, True, True],
    )
    del view_15, add, layer_norm_4, layer_norm_5
    # models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    add_2 = aten.add.out(dx, layer_norm_backward, out=layer_norm_backward)
    del layer_norm_backward
    # proj | models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    view_16 = aten.view.default(add_2, [8 * b, 16])
    mm_4 = aten.mm.default(view_16, proj_weight)
    t_6 = aten.t.default(view_16)
    mm_5 = aten.mm.default(t_6, reshape_1)
    sum_2 = aten.sum.dim_IntList(view_16, [0], True)
    view_17 = aten.view.default(sum_2, [16])
    view_18 = aten.view.default(mm_4, [b, 8, 16])
    del view_16, mm_4, t_6, reshape_1, sum_2
    # models.py:52  x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
    view_19 = aten.view.default(view_18, [b, 8, 4, 4])
    transpose_4 = aten.transpose.int(view_19, 1, 2)
    del view_18, view_19
    # models.py:51  y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attention_backward, attention_backward_1, attention_backward_2 = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        transpose_4, transpose, transpose_1, transpose_2, attention, attention_1, 0.0, True,
    )
    del transpose_4, transpose, transpose_1, transpose_2, attention, attention_1
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
    del cat, reshape_5, mm_6, t_7, view, sum_3
    # norm1 | models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    layer_norm_backward_3, layer_norm_backward_4, layer_norm_backward_5 = aten.native_layer_norm_backward.default(
        view_20, x, [16], layer_norm_1, layer_norm_2, norm1_weight, norm1_bias, [True, True, True],
    )
    del view_20, layer_norm_1, layer_norm_2
    # models.py:49  for t in self.qkv(self.norm1(x)).split(width, dim=2)
    add_3 = aten.add.out(add_2, layer_norm_backward_3, out=add_2)
    return (
        add_3, (layer_norm_backward_4, layer_norm_backward_5, mm_7, reshape_6, mm_5, view_17,
        layer_norm_backward_1, layer_norm_backward_2, mm_3, view_14, mm_1, view_11),
    )
