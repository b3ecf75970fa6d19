"""The draw's reference: Philox's published vectors, the noise, and the distribution of tokens against exact ones."""

import math

import pytest
import torch
from scipy import stats

pytest.importorskip("triton")

from skote.kernels.gumbel_best_triton import (
    BLOCK,
    gumbel_best,
    gumbel_best_reference,
    gumbel_reference,
    philox_reference,
)
from skote.runtime.cutoff import cutoff


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's kat_vectors, philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    seed = int.from_bytes((key[0] | key[1] << 32).to_bytes(8, "little"), "little", signed=True)
    result = philox_reference(tuple(torch.tensor([word]) for word in counter), torch.tensor([seed]))
    assert tuple(int(word) for word in result) == words


def rows(n, **values):
    """`n` equal rows of seed and position, but for what `values` says."""
    return (
        torch.as_tensor(values.get("seed", 0)).expand(n).contiguous(),
        torch.as_tensor(values.get("position", 0), dtype=torch.int32).expand(n).contiguous(),
    )


def test_the_noise_is_finite_and_gumbel():
    noise = gumbel_reference(*rows(1, seed=5), 500_000)[0].double()
    assert noise.isfinite().all()
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 0.01
    tail = noise[noise > 7.0]  # where a draw from a flat distribution is decided: 456 expected, without ties
    assert len(tail.unique()) == len(tail) > 400


def test_the_noise_depends_on_seed_position_and_id_alone():
    noise = gumbel_reference(
        torch.tensor([1, 2, 1, 1 + 2**40, -1]), torch.tensor([3, 3, 4, 3, 3], dtype=torch.int32), 50
    )
    assert len(noise.unique()) == noise.numel()
    assert torch.equal(noise[:1, :20], gumbel_reference(torch.tensor([1]), torch.tensor([3]), 20))


def draw(logits, temperature, top_k, top_p, n, *, seed=0):
    """Tokens at positions 0 to n - 1 of one request with the same `logits` at each."""
    vocab = len(logits)
    logits = logits.expand(n, vocab).contiguous()
    heat = torch.full((n,), temperature)
    lowest = cutoff(logits[:1], heat[:1], torch.tensor([top_k]), torch.tensor([top_p])).expand(n)
    best, first = torch.empty(n, 3), torch.empty(n, 3, dtype=torch.int32)
    gumbel_best_reference(
        logits, lowest, heat, torch.full((n,), seed), torch.arange(n, dtype=torch.int32), best, first, block=4
    )
    return first.gather(1, best.argmax(1, keepdim=True))[:, 0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (0.9, 6, 0.9), (1e30, 0, 1.0), (math.inf, 3, 1.0)],
)
def test_draws_are_distributed_as_the_softmax_of_what_is_kept(temperature, top_k, top_p):
    n, vocab = 20_000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 1.5
    weights = [math.exp((float(logit) - float(logits.max())) / temperature) for logit in logits]
    order = sorted(range(vocab), key=lambda index: -float(logits[index]))[: top_k or vocab]
    mass, kept = 0.0, []
    for index in order:
        if mass >= top_p * sum(weights[each] for each in order):
            break
        kept.append(index)
        mass += weights[index]
    tokens = draw(logits, temperature, top_k, top_p, n, seed=11)
    seen = [int((tokens == index).sum()) for index in kept]
    assert sum(seen) == n  # nothing else was drawn
    expected = [n * weights[index] / mass for index in kept]
    assert stats.chisquare(seen, expected).pvalue > 0.01


def test_temperature_zero_is_the_plain_maximum_whatever_the_cutoff():
    logits = torch.tensor([[1.0, 4.0, 4.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0, 5.0]])
    best, first = torch.empty(2, 2), torch.empty(2, 2, dtype=torch.int32)
    seed, position = rows(2)
    gumbel_best_reference(logits, torch.full((2,), 9.0), torch.zeros(2), seed, position, best, first, block=4)
    assert best.tolist() == [[4.0, 0.0], [3.0, 5.0]]
    assert first.tolist() == [[1, 4], [3, 4]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = torch.tensor([90.0, 100.0, 99.9, *[0.0] * 7])
    assert set(draw(logits, temperature, 0, 1.0, 50).tolist()) == {1}


def test_cpu_tensors_are_refused():
    with pytest.raises(TypeError, match="gumbel_best: logits is on cpu"):
        gumbel_best(*(torch.zeros(1, 1) for _ in range(7)), pdl=False)


def on_gpu(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device="cuda")


def results_on_gpu(rows, programs):
    best = torch.full((rows, programs), torch.nan, device="cuda")
    return best, torch.full((rows, programs), -1, dtype=torch.int32, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_the_launcher_covers_a_whole_vocabulary(pdl):
    vocab, programs = 128_256, math.ceil(128_256 / BLOCK)
    logits = torch.randn(2, vocab, device="cuda")
    inputs = (logits, on_gpu(-3.0, 0.5), on_gpu(1.0, 0.8), on_gpu(1, 2, dtype=torch.int64))
    position = on_gpu(10, 11, dtype=torch.int32)
    best, first = results_on_gpu(2, programs)
    gumbel_best(*inputs, position, best, first, pdl=pdl)
    expected_best, expected_first = results_on_gpu(2, programs)
    gumbel_best_reference(*inputs, position, expected_best, expected_first)
    torch.testing.assert_close(best, expected_best, rtol=1e-5, atol=2e-5)
    assert torch.equal(first, expected_first)


@pytest.mark.gpu
def test_a_graph_holds_cutoff_and_draw_and_repeats_its_bits():
    torch.manual_seed(3)
    rows, vocab = 2, 128_256
    logits = torch.randn(rows, vocab, device="cuda") * 4.0
    heat, top_k, top_p = on_gpu(1.0, 0.7), on_gpu(0, 40, dtype=torch.int64), on_gpu(0.9, 0.95)
    seed, position = on_gpu(1, 2, dtype=torch.int64), on_gpu(10, 11, dtype=torch.int32)
    best, first = results_on_gpu(rows, math.ceil(vocab / BLOCK))

    def run():
        lowest = cutoff(logits, heat, top_k, top_p)
        gumbel_best(logits, lowest, heat, seed, position, best, first, pdl=False)
        return lowest

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lowest = run()
    for _ in range(20):
        logits.copy_(torch.randn(rows, vocab, device="cuda") * 4.0)
        seen = []
        for _ in range(3):
            graph.replay()
            seen.append((lowest.clone(), best.clone(), first.clone()))
        assert all(torch.equal(a, b) for again in seen[1:] for a, b in zip(seen[0], again, strict=True))
        on_cpu = cutoff(*(each.cpu() for each in (logits, heat, top_k, top_p)))
        kept, kept_on_cpu = ((logits.cpu() >= each[:, None]).sum(1) for each in (lowest.cpu(), on_cpu))
        assert (kept - kept_on_cpu).abs().max() <= 1  # another rounding of exp may move the edge by one token


@pytest.mark.gpu
def test_other_shapes_and_types_are_refused():
    best, first = results_on_gpu(1, 1)
    wide = (torch.zeros(1, 50, device="cuda"), on_gpu(0.0), on_gpu(0.0))
    seed, position = on_gpu(0, dtype=torch.int64), on_gpu(0, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"seed is torch\.int32; the kernel takes torch\.int64"):
        gumbel_best(*wide, position, position, best, first, pdl=False)
    with pytest.raises(ValueError, match=r"best has shape \(1, 2\), expected \(1, 1\)"):
        gumbel_best(*wide, seed, position, torch.zeros(1, 2, device="cuda"), first, pdl=False)
