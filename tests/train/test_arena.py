"""Gradients in buckets."""

from __future__ import annotations

import torch
from torch import nn

from cpuft.train.arena import Bucket, GradientBuckets


def run(model: nn.Module, buckets: GradientBuckets[Bucket], inputs: torch.Tensor, is_last: bool) -> None:
    buckets.begin_pass(is_last)
    torch.autograd.backward(model(inputs).sum())


def test_buckets_have_the_sums_of_all_passes_and_are_sent_in_order_in_the_last_one() -> None:
    first, second, unused = nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(1, 1)
    model, sent = nn.Sequential(first, second), list[Bucket]()
    made = [Bucket([*one.parameters()], length) for one, length in ((second, 8), (first, 0), (unused, 0))]
    buckets, inputs = GradientBuckets(made, sent.append), torch.randn(4, 3)
    for _ in range(2):
        buckets.clear()
        run(model, buckets, inputs[:2], is_last=False)
        assert sent == []
        run(model, buckets, inputs[2:], is_last=True)
        assert sent == made[:2]
        buckets.send_rest()
        assert sent == made
        wanted = torch.autograd.grad(model(inputs).sum(), [*second.parameters(), *first.parameters()])
        found = [one for bucket in sent for one in bucket.split(bucket.buffer())]
        assert all(
            torch.allclose(one, other) for one, other in zip(found, [*wanted, torch.zeros(1, 1), torch.zeros(1)])
        )
        assert [bucket.is_last() for bucket in sent] == [False, False, True]
        assert all(
            one.grad is not None
            and one.grad.untyped_storage().data_ptr() == made[1].buffer().untyped_storage().data_ptr()
            for one in first.parameters()
        )
        # What an exchange leaves in the memory of a bucket is no gradient of the next update.
        for bucket in sent:
            bucket.buffer().fill_(7.0)
        buckets.clear()
        assert made[0].buffer()[3:].tolist() == [0.0] * 5
        sent.clear()


def test_a_bucket_has_the_methods_of_torch_s() -> None:
    layer = nn.Linear(3, 2)
    bucket = Bucket([*layer.parameters()])
    bucket.begin(is_last=True)
    assert bucket.parameters() == [*layer.parameters()]
    assert [one.shape for one in bucket.split(bucket.buffer())] == [one.shape for one in layer.parameters()]
    assert (bucket.buffer().shape, bucket.is_last()) == ((8,), True)
    assert {"parameters", "buffer", "is_last"} <= {*dir(torch._C._distributed_c10d.GradBucket)}
