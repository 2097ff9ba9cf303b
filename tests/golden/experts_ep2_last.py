"""Rank 1 of 2 (ep 1): stage 0 of 1, layers.0 to output.

training, schedule 1f1b, 1 microbatches, placements *: ddp
b is the number of samples in the microbatch at hand, B in the whole batch.
"""

import torch

aten = torch.ops.aten

RANK, MESH = 1, {'ep': 2}
PLACE = (0,)  # the pp rank of each stage
MICROBATCHES = 1
DEVICE = torch.device("cpu")  # the world's device when the program runs


def layers_0_forward(world, b, B, x, gate_weight, gate_bias, up, down):
    """Forward of layers.0."""
    # expert_layers.py:29  tokens = x.flatten(0, 1)
    view = aten.view.default(x, [3 * b, 4])
    # gate | expert_layers.py:30  weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
    t = aten.t.default(gate_weight)
    view_part = aten.slice.Tensor(view, 0, 3 * b // 2, 3 * b)
    view_part_ = aten.clone.default(view_part, memory_format=torch.contiguous_format)
    addmm = aten.addmm.default(gate_bias, view_part_, t)
    del t, view, view_part
    # expert_layers.py:30  weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
    softmax = aten._softmax.out(addmm, -1, False, out=addmm)
    topk, topk_1 = aten.topk.default(softmax, 2)
    del addmm
    # test_rows.py:64  keys, order = ids.flatten().sort()
    view_1 = aten.view.default(topk_1, [3 * b])
    sort, sort_1 = aten.sort.default(view_1)
    del view_1
    # test_rows.py:65  y = s.groups(x[order // CHOSEN], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    floor_divide = aten.floor_divide.default(sort_1, 2)
    index = aten.index.Tensor(view_part_, [floor_divide])
    del floor_divide
    # test_rows.py:58  counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    to_copy = aten._to_copy.default(sort, dtype=torch.float32)
    histc = aten.histc.default(to_copy, 3, 0, 2)
    del sort, to_copy
    # test_rows.py:59  return counts.cumsum(0, dtype=torch.int32)
    cumsum = aten.cumsum.default(histc, 0, dtype=torch.int32)
    del histc
    # test_rows.py:52  made: Tensor = grouped(F.gelu(grouped(rows, self.up, ends)), self.down, ends)
    # cumsum: Shard(0) -> Replicate() on ep
    cumsum_all = world.all_gather_values(cumsum, axis="ep", dim=0, pieces=[3, 3])
    # index: the rows of this place -> those of its groups on ep
    index_dispatched = world.dispatch_values(index, axis="ep", dim=0, rows=3 * b, pieces=[2, 1], ends=cumsum_all)
    cumsum_each = aten.view.default(cumsum_all, [2, 3])
    cumsum_total = aten.sum.dim_IntList(cumsum_each, [0], dtype=torch.int32)
    cumsum_here = aten.slice.Tensor(cumsum_total, 0, 2, 3)
    cumsum_before = aten.slice.Tensor(cumsum_total, 0, 1, 2)
    cumsum_own = aten.sub.Tensor(cumsum_here, cumsum_before)
    grouped_mm_fallback = torch.ops.transformers.grouped_mm_fallback.default(index_dispatched, up, cumsum_own)
    gelu = aten.gelu.default(grouped_mm_fallback)
    grouped_mm_fallback_1 = torch.ops.transformers.grouped_mm_fallback.default(gelu, down, cumsum_own)
    del index, cumsum_each, cumsum_total, cumsum_here, cumsum_before, cumsum_own
    # test_rows.py:65  y = s.groups(x[order // CHOSEN], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    view_2 = aten.view.default(topk, [3 * b])
    index_1 = aten.index.Tensor(view_2, [sort_1])
    unsqueeze = aten.unsqueeze.default(index_1, -1)
    # grouped_mm_fallback_1: the rows of its groups -> those of this place on ep
    grouped_mm_fallback_1_combined = world.combine_values(
        grouped_mm_fallback_1, axis="ep", dim=0, rows=3 * b, pieces=[2, 1], ends=cumsum_all,
    )
    mul = aten.mul.Tensor(grouped_mm_fallback_1_combined, unsqueeze)
    del topk, view_2, index_1, grouped_mm_fallback_1, cumsum_all
    # test_rows.py:66  back = torch.empty_like(order)
    empty_like = aten.empty_like.default(sort_1, pin_memory=False)
    # test_rows.py:67  back[order] = torch.arange(len(order))
    arange = aten.arange.default(3 * b, device=DEVICE, pin_memory=False)
    index_put = aten.index_put.default(empty_like, [sort_1], arange)
    del arange, empty_like
    # test_rows.py:68  return y[back].view(-1, CHOSEN, WIDTH).sum(1)
    index_2 = aten.index.Tensor(mul, [index_put])
    view_3 = aten.view.default(index_2, [-1, 2, 4])
    sum = aten.sum.dim_IntList(view_3, [1])
    del mul, index_2, view_3
    # expert_layers.py:31  return (tokens + self.experts(self, tokens, ids, weights)).view_as(x)
    add = aten.add.Tensor(view_part_, sum)
    view_4 = aten.view.default(add, [b // 2, 3, 4])
    return (
        view_4, (index_put, grouped_mm_fallback_1_combined, unsqueeze, sort_1, gelu, cumsum, grouped_mm_fallback,
        index_dispatched, topk_1, softmax, view_part_),
    )


def layers_0_backward(
    world, b, B, dx, index_put, grouped_mm_fallback_1_combined, unsqueeze, sort_1, gelu, cumsum,
    grouped_mm_fallback, index_dispatched, topk_1, softmax, view_part_, gate_weight, gate_bias, up, down,
):
    """Backward of layers.0."""
    # expert_layers.py:31  return (tokens + self.experts(self, tokens, ids, weights)).view_as(x)
    reshape = aten.reshape.default(dx, [3 * b // 2, 4])
    # test_rows.py:68  return y[back].view(-1, CHOSEN, WIDTH).sum(1)
    unsqueeze_1 = aten.unsqueeze.default(reshape, 1)
    expand = aten.expand.default(unsqueeze_1, [3 * b // 2, 2, 4])
    clone = aten.clone.default(expand, memory_format=torch.contiguous_format)
    unsafe_view = aten._unsafe_view.default(clone, [3 * b, 4])
    new_zeros = aten.new_zeros.default(
        unsafe_view, [3 * b, 4], dtype=torch.float64, layout=torch.strided, device=DEVICE,
    )
    index_put_1 = aten.index_put.default(new_zeros, [index_put], unsafe_view, True)
    del reshape, unsqueeze_1, expand, clone, unsafe_view, new_zeros
    # test_rows.py:65  y = s.groups(x[order // CHOSEN], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    mul_1 = aten.mul.Tensor(index_put_1, grouped_mm_fallback_1_combined)
    mul_2 = aten.mul.Tensor(index_put_1, unsqueeze)
    sum_1 = aten.sum.dim_IntList(mul_1, [1], True)
    squeeze = aten.squeeze.dims(sum_1, [1])
    new_zeros_1 = aten.new_zeros.default(squeeze, [3 * b], dtype=torch.float64, layout=torch.strided, device=DEVICE)
    index_put_2 = aten.index_put.default(new_zeros_1, [sort_1], squeeze, True)
    view_5 = aten.view.default(index_put_2, [3 * b // 2, 2])
    del index_put_1, mul_1, sum_1, squeeze, new_zeros_1, index_put_2
    # test_rows.py:52  made: Tensor = grouped(F.gelu(grouped(rows, self.up, ends)), self.down, ends)
    # cumsum: Shard(0) -> Replicate() on ep
    cumsum_all_ = world.all_gather_values(cumsum, axis="ep", dim=0, pieces=[3, 3])
    cumsum_each_ = aten.view.default(cumsum_all_, [2, 3])
    cumsum_total_ = aten.sum.dim_IntList(cumsum_each_, [0], dtype=torch.int32)
    cumsum_here_ = aten.slice.Tensor(cumsum_total_, 0, 2, 3)
    cumsum_before_ = aten.slice.Tensor(cumsum_total_, 0, 1, 2)
    cumsum_own_ = aten.sub.Tensor(cumsum_here_, cumsum_before_)
    # mul_2: the rows of this place -> those of its groups on ep
    mul_2_dispatched = world.dispatch_values(mul_2, axis="ep", dim=0, rows=3 * b, pieces=[2, 1], ends=cumsum_all_)
    grouped_mm_fallback_backward, grouped_mm_fallback_backward_1 = torch.ops.transformers.grouped_mm_fallback_backward.default(
        gelu, down, cumsum_own_, mul_2_dispatched,
    )
    gelu_backward = aten.gelu_backward.default(grouped_mm_fallback_backward, grouped_mm_fallback)
    _, grouped_mm_fallback_backward_2 = torch.ops.transformers.grouped_mm_fallback_backward.default(
        index_dispatched, up, cumsum_own_, gelu_backward,
    )
    del cumsum_all_, cumsum_each_, cumsum_total_, cumsum_here_, cumsum_before_, cumsum_own_, mul_2, mul_2_dispatched
    del grouped_mm_fallback_backward, gelu_backward
    # expert_layers.py:30  weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
    new_zeros_2 = aten.new_zeros.default(view_5, [3 * b // 2, 3])
    scatter = aten.scatter.src(new_zeros_2, -1, topk_1, view_5)
    softmax_backward_data = aten._softmax_backward_data.default(scatter, softmax, -1, torch.float64)
    del view_5, new_zeros_2, scatter
    # gate | expert_layers.py:30  weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
    t_1 = aten.t.default(softmax_backward_data)
    mm = aten.mm.default(t_1, view_part_)
    sum_2 = aten.sum.dim_IntList(softmax_backward_data, [0], True)
    # sum_2: Partial(sum) -> Replicate() on ep
    sum_2_sum = world.all_reduce_values(sum_2, axis="ep", how="sum")
    view_6 = aten.view.default(sum_2_sum, [3])
    # mm: Partial(sum) -> Replicate() on ep
    mm_sum = world.all_reduce_values(mm, axis="ep", how="sum")
    return (mm_sum, view_6, grouped_mm_fallback_backward_2, grouped_mm_fallback_backward_1)


def layers_1_forward(world, b, B, x, gate_weight, gate_bias, up, down):
    """Forward of layers.1."""
    # expert_layers.py:29  tokens = x.flatten(0, 1)
    view = aten.view.default(x, [3 * b // 2, 4])
    # gate | expert_layers.py:30  weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
    t = aten.t.default(gate_weight)
    addmm = aten.addmm.default(gate_bias, view, t)
    del t
    # expert_layers.py:30  weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
    softmax = aten._softmax.out(addmm, -1, False, out=addmm)
    topk, topk_1 = aten.topk.default(softmax, 2)
    del addmm
    # test_rows.py:64  keys, order = ids.flatten().sort()
    view_1 = aten.view.default(topk_1, [3 * b])
    sort, sort_1 = aten.sort.default(view_1)
    del view_1
    # test_rows.py:65  y = s.groups(x[order // CHOSEN], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    floor_divide = aten.floor_divide.default(sort_1, 2)
    index = aten.index.Tensor(view, [floor_divide])
    # test_rows.py:58  counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    to_copy = aten._to_copy.default(sort, dtype=torch.float32)
    histc = aten.histc.default(to_copy, 3, 0, 2)
    del sort, to_copy
    # test_rows.py:59  return counts.cumsum(0, dtype=torch.int32)
    cumsum = aten.cumsum.default(histc, 0, dtype=torch.int32)
    del histc
    # test_rows.py:52  made: Tensor = grouped(F.gelu(grouped(rows, self.up, ends)), self.down, ends)
    # cumsum: Shard(0) -> Replicate() on ep
    cumsum_all = world.all_gather_values(cumsum, axis="ep", dim=0, pieces=[3, 3])
    # index: the rows of this place -> those of its groups on ep
    index_dispatched = world.dispatch_values(index, axis="ep", dim=0, rows=3 * b, pieces=[2, 1], ends=cumsum_all)
    cumsum_each = aten.view.default(cumsum_all, [2, 3])
    cumsum_total = aten.sum.dim_IntList(cumsum_each, [0], dtype=torch.int32)
    cumsum_here = aten.slice.Tensor(cumsum_total, 0, 2, 3)
    cumsum_before = aten.slice.Tensor(cumsum_total, 0, 1, 2)
    cumsum_own = aten.sub.Tensor(cumsum_here, cumsum_before)
    grouped_mm_fallback = torch.ops.transformers.grouped_mm_fallback.default(index_dispatched, up, cumsum_own)
    gelu = aten.gelu.default(grouped_mm_fallback)
    grouped_mm_fallback_1 = torch.ops.transformers.grouped_mm_fallback.default(gelu, down, cumsum_own)
    del index, cumsum_each, cumsum_total, cumsum_here, cumsum_before, cumsum_own
    # test_rows.py:65  y = s.groups(x[order // CHOSEN], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    view_2 = aten.view.default(topk, [3 * b])
    index_1 = aten.index.Tensor(view_2, [sort_1])
    unsqueeze = aten.unsqueeze.default(index_1, -1)
    # grouped_mm_fallback_1: the rows of its groups -> those of this place on ep
    grouped_mm_fallback_1_combined = world.combine_values(
        grouped_mm_fallback_1, axis="ep", dim=0, rows=3 * b, pieces=[2, 1], ends=cumsum_all,
    )
    mul = aten.mul.Tensor(grouped_mm_fallback_1_combined, unsqueeze)
    del topk, view_2, index_1, grouped_mm_fallback_1, cumsum_all
    # test_rows.py:66  back = torch.empty_like(order)
    empty_like = aten.empty_like.default(sort_1, pin_memory=False)
    # test_rows.py:67  back[order] = torch.arange(len(order))
    arange = aten.arange.default(3 * b, device=DEVICE, pin_memory=False)
    index_put = aten.index_put.default(empty_like, [sort_1], arange)
    del arange, empty_like
    # test_rows.py:68  return y[back].view(-1, CHOSEN, WIDTH).sum(1)
    index_2 = aten.index.Tensor(mul, [index_put])
    view_3 = aten.view.default(index_2, [-1, 2, 4])
    sum = aten.sum.dim_IntList(view_3, [1])
    del mul, index_2, view_3
    # expert_layers.py:31  return (tokens + self.experts(self, tokens, ids, weights)).view_as(x)
    add = aten.add.Tensor(view, sum)
    view_4 = aten.view.default(add, [b // 2, 3, 4])
    return (
        view_4, (index_put, grouped_mm_fallback_1_combined, unsqueeze, sort_1, gelu, cumsum, grouped_mm_fallback,
        index_dispatched, floor_divide, topk_1, softmax, view),
    )


def layers_1_backward(
    world, b, B, dx, index_put, grouped_mm_fallback_1_combined, unsqueeze, sort_1, gelu, cumsum,
    grouped_mm_fallback, index_dispatched, floor_divide, topk_1, softmax, view, gate_weight, gate_bias, up,
    down,
):
    """Backward of layers.1."""
    # expert_layers.py:31  return (tokens + self.experts(self, tokens, ids, weights)).view_as(x)
    reshape = aten.reshape.default(dx, [3 * b // 2, 4])
    # test_rows.py:68  return y[back].view(-1, CHOSEN, WIDTH).sum(1)
    unsqueeze_1 = aten.unsqueeze.default(reshape, 1)
    expand = aten.expand.default(unsqueeze_1, [3 * b // 2, 2, 4])
    clone = aten.clone.default(expand, memory_format=torch.contiguous_format)
    unsafe_view = aten._unsafe_view.default(clone, [3 * b, 4])
    new_zeros = aten.new_zeros.default(
        unsafe_view, [3 * b, 4], dtype=torch.float64, layout=torch.strided, device=DEVICE,
    )
    index_put_1 = aten.index_put.default(new_zeros, [index_put], unsafe_view, True)
    del unsqueeze_1, expand, clone, unsafe_view, new_zeros
    # test_rows.py:65  y = s.groups(x[order // CHOSEN], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    mul_1 = aten.mul.Tensor(index_put_1, grouped_mm_fallback_1_combined)
    mul_2 = aten.mul.Tensor(index_put_1, unsqueeze)
    sum_1 = aten.sum.dim_IntList(mul_1, [1], True)
    squeeze = aten.squeeze.dims(sum_1, [1])
    new_zeros_1 = aten.new_zeros.default(squeeze, [3 * b], dtype=torch.float64, layout=torch.strided, device=DEVICE)
    index_put_2 = aten.index_put.default(new_zeros_1, [sort_1], squeeze, True)
    view_5 = aten.view.default(index_put_2, [3 * b // 2, 2])
    del index_put_1, mul_1, sum_1, squeeze, new_zeros_1, index_put_2
    # test_rows.py:52  made: Tensor = grouped(F.gelu(grouped(rows, self.up, ends)), self.down, ends)
    # cumsum: Shard(0) -> Replicate() on ep
    cumsum_all_ = world.all_gather_values(cumsum, axis="ep", dim=0, pieces=[3, 3])
    cumsum_each_ = aten.view.default(cumsum_all_, [2, 3])
    cumsum_total_ = aten.sum.dim_IntList(cumsum_each_, [0], dtype=torch.int32)
    cumsum_here_ = aten.slice.Tensor(cumsum_total_, 0, 2, 3)
    cumsum_before_ = aten.slice.Tensor(cumsum_total_, 0, 1, 2)
    cumsum_own_ = aten.sub.Tensor(cumsum_here_, cumsum_before_)
    # mul_2: the rows of this place -> those of its groups on ep
    mul_2_dispatched = world.dispatch_values(mul_2, axis="ep", dim=0, rows=3 * b, pieces=[2, 1], ends=cumsum_all_)
    grouped_mm_fallback_backward, grouped_mm_fallback_backward_1 = torch.ops.transformers.grouped_mm_fallback_backward.default(
        gelu, down, cumsum_own_, mul_2_dispatched,
    )
    gelu_backward = aten.gelu_backward.default(grouped_mm_fallback_backward, grouped_mm_fallback)
    grouped_mm_fallback_backward_2, grouped_mm_fallback_backward_3 = torch.ops.transformers.grouped_mm_fallback_backward.default(
        index_dispatched, up, cumsum_own_, gelu_backward,
    )
    del cumsum_each_, cumsum_total_, cumsum_here_, cumsum_before_, cumsum_own_, mul_2, mul_2_dispatched
    del grouped_mm_fallback_backward, gelu_backward
    # test_rows.py:65  y = s.groups(x[order // CHOSEN], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    new_zeros_2 = aten.new_zeros.default(
        grouped_mm_fallback_backward_2, [3 * b // 2, 4], dtype=torch.float64, layout=torch.strided, device=DEVICE,
    )
    # grouped_mm_fallback_backward_2: the rows of its groups -> those of this place on ep
    grouped_mm_fallback_backward_2_combined = world.combine_values(
        grouped_mm_fallback_backward_2, axis="ep", dim=0, rows=3 * b, pieces=[2, 1], ends=cumsum_all_,
    )
    index_put_3 = aten.index_put.default(new_zeros_2, [floor_divide], grouped_mm_fallback_backward_2_combined, True)
    del grouped_mm_fallback_backward_2, new_zeros_2, cumsum_all_, grouped_mm_fallback_backward_2_combined
    # test_rows.py:65  y = s.groups(x[order // CHOSEN], ends_of(keys)) * weights.flatten()[order].unsqueeze(-1)
    add_1 = aten.add.Tensor(reshape, index_put_3)
    del reshape, index_put_3
    # expert_layers.py:30  weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
    new_zeros_3 = aten.new_zeros.default(view_5, [3 * b // 2, 3])
    scatter = aten.scatter.src(new_zeros_3, -1, topk_1, view_5)
    softmax_backward_data = aten._softmax_backward_data.default(scatter, softmax, -1, torch.float64)
    del view_5, new_zeros_3, scatter
    # gate | expert_layers.py:30  weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
    mm = aten.mm.default(softmax_backward_data, gate_weight)
    t_1 = aten.t.default(softmax_backward_data)
    mm_1 = aten.mm.default(t_1, view)
    sum_2 = aten.sum.dim_IntList(softmax_backward_data, [0], True)
    # sum_2: Partial(sum) -> Replicate() on ep
    sum_2_sum = world.all_reduce_values(sum_2, axis="ep", how="sum")
    view_6 = aten.view.default(sum_2_sum, [3])
    del softmax_backward_data, t_1, sum_2, sum_2_sum
    # expert_layers.py:30  weights, ids = self.gate(tokens).softmax(-1).topk(CHOSEN)
    add_2 = aten.add.Tensor(add_1, mm)
    del add_1, mm
    # expert_layers.py:29  tokens = x.flatten(0, 1)
    reshape_1 = aten.reshape.default(add_2, [b // 2, 3, 4])
    # mm_1: Partial(sum) -> Replicate() on ep
    mm_1_sum = world.all_reduce_values(mm_1, axis="ep", how="sum")
    return reshape_1, (mm_1_sum, view_6, grouped_mm_fallback_backward_3, grouped_mm_fallback_backward_1)


def output_forward(world, b, B, x):
    """Forward of output."""
    # expert_layers.py:44  return x.square().mean()
    pow = aten.pow.Tensor_Scalar(x, 2)
    sum = aten.sum.dim_IntList(pow, [0, 1, 2], False, dtype=torch.float64)
    # sum: Partial(sum) -> Replicate() on ep
    sum_sum = world.all_reduce_values(sum, axis="ep", how="sum")
    div = aten.div.Tensor(sum_sum, 12 * B)
    return div, (x,)


def output_backward(b, B, dx, x):
    """Backward of output."""
    # expert_layers.py:44  return x.square().mean()
    expand = aten.expand.default(dx, [b // 2, 3, 4])
    div_1 = aten.div.Scalar(expand, 12 * B)
    pow_1 = aten.pow.Tensor_Scalar(x, 1.0)
    mul = aten.mul.Scalar(pow_1, 2.0)
    mul_1 = aten.mul.Tensor(div_1, mul)
    return mul_1


def stage0_forward(world, batch, k):
    b, B = batch.sizes[k], batch.size
    x = batch.input("args[0]", k)
    saved = []
    layers_0, kept = layers_0_forward(world, b, B, x, *world.parameters("layers.0"))
    saved.append(kept)
    layers_1, kept = layers_1_forward(world, b, B, layers_0, *world.parameters("layers.1"))
    saved.append(kept)
    output, kept = output_forward(world, b, B, layers_1)
    saved.append(kept)
    return output, saved


def stage0_backward(world, batch, k, saved):
    b, B = batch.sizes[k], batch.size
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    d_output = output_backward(b, B, one, *saved.pop())
    d_layers_1, grads = layers_1_backward(world, b, B, d_output, *saved.pop(), *world.parameters("layers.1"))
    world.accumulate("layers.1", grads)
    grads = layers_0_backward(world, b, B, d_layers_1, *saved.pop(), *world.parameters("layers.0"))
    world.accumulate("layers.0", grads)


def step(world, batch):
    """1 forward, then 1 backward."""
    saved_0 = world.store()
    loss = {}
    with world.action("F", stage=0, microbatch=0):
        loss[0], saved_0[0] = stage0_forward(world, batch, 0)
    with world.action("B", stage=0, microbatch=0):
        stage0_backward(world, batch, 0, saved_0.pop(0))
    loss = world.total([], shape=(), dtype=torch.float64)  # place 0 of ep adds it
    return {"loss": loss}
