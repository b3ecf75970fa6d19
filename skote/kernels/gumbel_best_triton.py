"""A draw from the softmax of many logits, and the first stage of the maximum that it becomes.

best[r, p] = max over the ids of program p with logits[r, id] >= cutoff[r] of logits[r, id] + temperature[r] * g(id)
first[r, p] = the lowest id that reaches it;   g(id) = -log(-log(1 - v)),   v uniform in (0, 1)

The id of the largest perturbed logit is distributed as softmax(logits / temperature) (the Gumbel-max trick: Gumbel,
1954; Maddison et al., arXiv 1411.0030): the multiple by the temperature moves no maximum, overflows for no small
temperature, and leaves the plain argmax at temperature 0, where the cutoff has no effect either.

v = (w + 1/2) / 2^32 with w the first word of Philox4x32-10 (Salmon et al., SC 2011; counter (id, position + 1, 0, 0),
key seed): a token depends on its logits, its request's seed and its own position, and on nothing else. The largest g
come from the smallest v, which fp32 tells apart best, so that few of them tie even in a large vocabulary.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skote.kernels.launch import check_best, check_dtype, check_rank, check_shape, check_tensors

BLOCK = 1024
"""Ids of one program; `best` and `first` have `ceil(vocab / BLOCK)` columns."""

_WORD = 0xFFFFFFFF
_HOTTEST = 1e30  # times the largest noise is still finite, and no logit is seen beside it
_HOTTEST_KERNEL = tl.constexpr(_HOTTEST)
_WARPS = 4


def philox_reference(counter: tuple[torch.Tensor, ...], seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10: four words from a `counter` of four words and the 64 bits of `seed`.

    Words are int64 tensors in [0, 2^32) that broadcast with each other and with `seed` (int64).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        high0, low0 = _product(0xD2511F53, c0)
        high2, low2 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _product(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product of two words, which int64 cannot hold as a whole."""
    by_low, by_high = word * (factor & 0xFFFF), word * (factor >> 16)
    return (by_high + (by_low >> 16)) >> 16, (by_low + ((by_high & 0xFFFF) << 16)) & _WORD


def gumbel_reference(seed: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """The noise g, fp32 `[rows, vocab]`, for tokens at `position` (int32 `[rows]`) under `seed` (int64 `[rows]`)."""
    ids = torch.arange(vocab, device=seed.device)[None]
    zero = torch.zeros_like(ids)
    word = philox_reference((ids, position.long()[:, None] & _WORD, zero, zero), seed[:, None])[0]
    v = ((word.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -(-torch.log1p(-v)).log()


def gumbel_best_reference(
    logits: torch.Tensor,
    cutoff: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    best: torch.Tensor,
    first: torch.Tensor,
    *,
    block: int = BLOCK,
) -> None:
    """The kernel in framework ops, `block` ids a program; arguments as `gumbel_best`."""
    vocab = logits.shape[1]
    heat = temperature.clamp(max=_HOTTEST)[:, None]
    perturbed = logits + heat * gumbel_reference(seed, position + 1, vocab)
    kept = (logits >= cutoff[:, None]) | (heat == 0.0)
    perturbed = perturbed.masked_fill(~kept, -torch.inf)
    for program, part in enumerate(perturbed.split(block, dim=1)):
        top = part.amax(1)
        ids = torch.arange(program * block, program * block + part.shape[1], device=logits.device)
        best[:, program] = top
        first[:, program] = torch.where(part == top[:, None], ids, vocab - 1).amin(1)


@triton.jit
def gumbel_best_kernel(
    logits_ptr,
    cutoff_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    first_ptr,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (ceil(vocab / BLOCK), rows). Everything is read after the wait; an idle row writes nothing."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    row = tl.program_id(1)
    position = tl.load(position_ptr + row, eviction_policy="evict_last") + 1
    if position > 0:
        temperature = tl.load(temperature_ptr + row, eviction_policy="evict_last")
        cutoff = tl.load(cutoff_ptr + row, eviction_policy="evict_last")
        seed = tl.load(seed_ptr + row, eviction_policy="evict_last")
        ids = program * BLOCK + tl.arange(0, BLOCK)
        there = ids < vocab
        logits = tl.load(
            logits_ptr + row.to(tl.int64) * vocab + ids, mask=there, other=float("-inf"), eviction_policy="evict_last"
        )
        zero = ids * 0
        word, _, _, _ = tl.philox(seed, ids, zero + position, zero, zero)
        v = tl.minimum((word.to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
        # -log(1 - v): its series where 1 - v would round v's last digits away.
        small = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
        exponential = tl.where(v < 2.0**-8, small, -tl.log(1.0 - v))
        perturbed = logits - tl.minimum(temperature, _HOTTEST_KERNEL) * tl.log(exponential)
        lowest = tl.where(temperature == 0.0, float("-inf"), cutoff)
        perturbed = tl.where(logits >= lowest, perturbed, float("-inf"))
        best = tl.max(perturbed, axis=0)
        first = tl.min(tl.where(there & (perturbed == best), ids, vocab - 1), axis=0)
        entry = row * tl.num_programs(0) + program
        tl.store(best_ptr + entry, best)
        tl.store(first_ptr + entry, first)


def gumbel_best(
    logits: torch.Tensor,
    cutoff: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    best: torch.Tensor,
    first: torch.Tensor,
    *,
    pdl: bool,
) -> None:
    """Launch the kernel.

    Args:
        logits: fp32 `[rows, vocab]`.
        cutoff: fp32 `[rows]`, the smallest logit that may be drawn (`skote.runtime.cutoff`).
        temperature: fp32 `[rows]`, 0 for the plain argmax.
        seed: int64 `[rows]`.
        position: int32 `[rows]`, of the last token so far, the draw's own is one later; negative: an idle row, for
            which nothing is written.
        best, first: fp32 and int32 `[rows, ceil(vocab / BLOCK)]`, written; `greedy_token` reduces them.

    Raises:
        TypeError, ValueError: what the checks of `launch` refuse.
    """
    chosen_by = {"cutoff": cutoff, "temperature": temperature, "seed": seed, "position": position}
    check_tensors("gumbel_best", logits=logits, **chosen_by, best=best, first=first)
    check_rank("gumbel_best", 2, logits=logits)
    rows, vocab = logits.shape
    programs = triton.cdiv(vocab, BLOCK)
    check_dtype("gumbel_best", torch.float32, logits=logits, cutoff=cutoff, temperature=temperature)
    check_dtype("gumbel_best", torch.int64, seed=seed)
    check_dtype("gumbel_best", torch.int32, position=position)
    check_shape("gumbel_best", (rows,), **chosen_by)
    check_best("gumbel_best", (rows, programs), best=best, first=first)
    gumbel_best_kernel[(programs, rows)](
        logits,
        cutoff,
        temperature,
        seed,
        position,
        best,
        first,
        vocab,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )
