"""The loss of a causal language model, against torch's cross entropy of all logits at once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from parallel3d.comm.collectives import Group
from parallel3d.errors import DataError
from parallel3d.models import CausalLMLoss, causal_lm_loss
from parallel3d.models.loss import SlicedLogits


def case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 7, 11, generator=generator).mul(3).to(dtype).requires_grad_()
    labels = torch.randint(11, (2, 7), generator=generator)
    labels[0, 2], labels[1, 4:] = -100, -100
    return logits, labels


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_value_and_gradient_equal_cross_entropy(chunk: int, smoothing: float, dtype: torch.dtype):
    logits, labels = case(dtype)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    wanted = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    wanted.backward()
    loss = CausalLMLoss(chunk=chunk, label_smoothing=smoothing)(logits, labels)
    loss.backward()
    assert loss.dtype == wide.dtype
    torch.testing.assert_close(loss, wanted)
    flat = CausalLMLoss(chunk=chunk, label_smoothing=smoothing)(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(flat, wanted)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_loss_equals_cross_entropy_and_leaves_the_logits_alone(dtype: torch.dtype):
    torch.compiler.reset()
    logits, labels = case(dtype)
    before = logits.detach().clone()
    wide = before.float().requires_grad_()
    wanted = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    wanted.backward()
    loss = CausalLMLoss(label_smoothing=0.1, chunk=2).compiled(backend="aot_eager")(logits, labels)
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype))
    assert torch.equal(logits, before)


def test_z_loss_is_the_squared_log_of_the_partition_function():
    logits, labels = case()
    valid = labels != -100
    log_z = logits.detach().double().exp().sum(-1).log()
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    wanted = plain + 0.01 * (log_z[valid] ** 2).mean()
    torch.testing.assert_close(CausalLMLoss(z_loss=0.01, chunk=2)(logits, labels).double(), wanted.double())


def test_per_token_gives_sum_and_count():
    logits, labels = case()
    total, count = CausalLMLoss(per_token=True)(logits, labels)
    assert int(count) == 10
    torch.testing.assert_close(total, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))


def test_shift_predicts_the_next_token():
    logits, labels = case()
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(CausalLMLoss(shift=True, chunk=2)(logits, labels), wanted)


def test_without_any_label_the_loss_is_zero():
    logits, labels = case()
    loss = causal_lm_loss(logits, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_labels_of_another_shape_are_refused():
    logits, labels = case()
    with pytest.raises(DataError, match=r"labels are \[2, 6\]"):
        causal_lm_loss(logits, labels[:, 1:])


def test_a_loss_that_takes_sliced_logits_for_a_tensor_is_told_what_they_are():
    logits = SlicedLogits(torch.zeros(2, 7, 6), Group((0, 1), None), 11)
    with pytest.raises(AttributeError, match=r"no 'flatten': they are this rank's 6 of 11 words; logits.whole\(\)"):
        logits.flatten(0, 1)
    assert copy.deepcopy(logits).local.shape == (2, 7, 6)


@pytest.mark.parametrize("field", ["local", "group", "vocab_size"])
def test_sliced_logits_not_filled_yet_have_no_fields(field: str):
    """torch.compile of PyTorch 2.11 asks for them of the object whose constructor it traces."""
    assert not hasattr(SlicedLogits.__new__(SlicedLogits), field)
