"""The draw's kernel against its reference: on CUDA, or raw through Triton's interpreter (see test_interpreter.py)."""

import pytest
import torch
import triton

from skote.kernels.gumbel_best_triton import gumbel_best_kernel, gumbel_best_reference

INTERPRETED = triton.knobs.runtime.interpret
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"


def column(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def results(rows, programs):
    best = torch.full((rows, programs), torch.nan, device=DEVICE)
    return best, torch.full((rows, programs), -1, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("vocab", "block"), [(37, 16), (64, 16), (2100, 1024)])
def test_the_kernel_equals_its_reference(vocab, block):
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)).to(DEVICE) * 3.0
    logits[3, vocab - 1] = logits[3, vocab // 2] = 30.0  # a tie
    lowest = column(-torch.inf, 1.0, 40.0, 40.0, 40.0)
    temperature = column(1.0, 0.7, 1.0, 0.0, 1e38)
    seed = column(0, 2**40 + 7, -1, 5, 2**62, dtype=torch.int64)
    position = column(0, 2**20, 12, -1, -5, dtype=torch.int32)
    position[3] = 3
    programs = triton.cdiv(vocab, block)
    inputs = (logits, lowest, temperature, seed, position)
    best, first = results(5, programs)
    gumbel_best_kernel[(programs, 5)](*inputs, best, first, vocab, BLOCK=block, PDL=False)
    expected_best, expected_first = results(5, programs)
    gumbel_best_reference(*inputs, expected_best, expected_first, block=block)
    torch.testing.assert_close(best[:4], expected_best[:4], rtol=1e-5, atol=1e-5)
    assert torch.equal(first[:4], expected_first[:4])
    assert best[2].isneginf().all()
    assert torch.equal(best[3], torch.stack([part.max() for part in logits[3].split(block)]))
    assert best[4].isnan().all()  # idle
    assert first[4].tolist() == [-1] * programs


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    seed, position = column(7, 8, 9, dtype=torch.int64), column(4, 5, 6, dtype=torch.int32)
    lowest, temperature = column(-torch.inf, -torch.inf, -torch.inf), column(1.0, 0.5, 0.9)
    together = results(3, 4)
    gumbel_best_kernel[(4, 3)](logits, lowest, temperature, seed, position, *together, 50, BLOCK=16, PDL=False)
    for row in range(3):
        alone = results(1, 4)
        own = (each[row : row + 1] for each in (logits, lowest, temperature, seed, position))
        gumbel_best_kernel[(4, 1)](*own, *alone, 50, BLOCK=16, PDL=False)
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])
