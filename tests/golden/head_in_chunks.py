def norm_forward(b, B, x, x_1, weight, bias):
    """Forward of norm."""
    # blocks.0 | models.py:53  return x + self.down(F.gelu(self.up(self.norm2(x))))
    add = aten.add.Tensor(x, x_1)
    # models.py:89  logits = self.head(self.norm(x))
    layer_norm, layer_norm_1, layer_norm_2 = aten.native_layer_norm.default(add, [8], weight, bias, 1e-05)
    return layer_norm, (add, layer_norm_1, layer_norm_2)


def norm_backward(b, B, dx, add, layer_norm_1, layer_norm_2, weight, bias):
    """Backward of norm."""
    # models.py:89  logits = self.head(self.norm(x))
    layer_norm_backward, layer_norm_backward_1, layer_norm_backward_2 = aten.native_layer_norm_backward.default(
        dx, add, [8], layer_norm_1, layer_norm_2, weight, bias, [True, True, True],
    )
    return layer_norm_backward, (layer_norm_backward_1, layer_norm_backward_2)


def head_forward(b, B, x, labels, to_copy, wte_weight):
    """Forward of head."""
    # models.py:89  logits = self.head(self.norm(x))
    t = aten.t.default(wte_weight)
    # all, in chunks: 6 at most
    nll_loss_forward = aten.new_zeros.default(x, [], dtype=torch.float64)
    for start in range(0, 64, 11):
        n = min(11, 64 - start)
        x_part = aten.slice.Tensor(x, 1, start, start + n).contiguous()
        labels_part = aten.slice.Tensor(labels, 1, start, start + n).contiguous()
        # models.py:89  logits = self.head(self.norm(x))
        view = aten.view.default(x_part, [b * n, 8])
        mm = aten.mm.default(view, t)
        unsafe_view = aten._unsafe_view.default(mm, [b, n, 512])
        del x_part, view, mm
        # models.py:90  return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        view_1 = aten.view.default(unsafe_view, [b * n, 512])
        view_2 = aten.view.default(labels_part, [b * n])
        log_softmax = aten._log_softmax.default(view_1, 1, False)
        nll_loss_forward_part, _ = aten.nll_loss_forward.default(log_softmax, view_2, None, 2, -100)
        del unsafe_view, view_1, labels_part, view_2, log_softmax
        aten.add_.Tensor(nll_loss_forward, nll_loss_forward_part)
        del nll_loss_forward_part
    del t
    # models.py:90  return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    div = aten.div.Tensor(nll_loss_forward, to_copy)
    return div, (x, labels)


def head_backward(b, B, dx, x, labels, to_copy, wte_weight):
    """Backward of head."""
    # recomputed
    # models.py:89  logits = self.head(self.norm(x))
    t = aten.t.default(wte_weight)
    # backward
    # models.py:90  return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    div_1 = aten.div.Tensor(dx, to_copy)
    # all, in chunks: 6 at most
    mm_1 = aten.new_zeros.default(x, [512, 8], dtype=torch.float64)
    view_5 = aten.new_empty.default(x, [b, 64, 8], dtype=torch.float64)
    for start in range(0, 64, 11):
        n = min(11, 64 - start)
        x_part = aten.slice.Tensor(x, 1, start, start + n).contiguous()
        labels_part = aten.slice.Tensor(labels, 1, start, start + n).contiguous()
        # recomputed
        # models.py:89  logits = self.head(self.norm(x))
        view = aten.view.default(x_part, [b * n, 8])
        mm = aten.mm.default(view, t)
        unsafe_view = aten._unsafe_view.default(mm, [b, n, 512])
        del x_part, mm
        # models.py:90  return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        view_1 = aten.view.default(unsafe_view, [b * n, 512])
        view_2 = aten.view.default(labels_part, [b * n])
        log_softmax = aten._log_softmax.default(view_1, 1, False)
        del unsafe_view, view_1, labels_part
        # backward
        # models.py:90  return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        nll_loss_backward = aten.nll_loss_backward.default(div_1, log_softmax, view_2, None, 2, -100, to_copy)
        log_softmax_backward_data = aten._log_softmax_backward_data.default(
            nll_loss_backward, log_softmax, 1, torch.float64,
        )
        view_3 = aten.view.default(log_softmax_backward_data, [b, n, 512])
        del log_softmax, view_2, nll_loss_backward, log_softmax_backward_data
        # models.py:89  logits = self.head(self.norm(x))
        view_4 = aten.view.default(view_3, [b * n, 512])
        t_1 = aten.t.default(view_4)
        mm_1_part = aten.mm.default(t_1, view)
        mm_2 = aten.mm.default(view_4, wte_weight)
        view_5_part = aten.view.default(mm_2, [b, n, 8])
        del view_3, view_4, t_1, view, mm_2
        aten.add_.Tensor(mm_1, mm_1_part)
        aten.copy_.default(aten.slice.Tensor(view_5, 1, start, start + n), view_5_part)
        del mm_1_part, view_5_part
    return view_5, (mm_1,)
