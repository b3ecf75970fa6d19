"""The overhead that is printed is computed from stamps alone: with a dispatcher whose stamps are known it is exact."""

from __future__ import annotations

from concurrent.futures import Future

from skote.eval.harness import REQUESTS, TOKENS, measure_overhead
from skote.types import Chunk, Completion


class ScriptedDispatcher:
    """Every request takes 300 us and 20 us for each token after the first."""

    def dispatch(self, request):
        end_ns = 300_000 + 20_000 * (request.max_new_tokens - 1)
        future = Future()
        future.set_result(
            Completion(
                request_id=request.request_id,
                input_tokens=len(request.input_ids),
                output_ids=(0,) * request.max_new_tokens,
                chunks=(Chunk(end_ns, request.max_new_tokens),),
                dispatched_ns=0,
                admitted_ns=0,
                end_ns=end_ns,
                status="ok",
            )
        )
        return future


def test_overhead_a_token_and_a_request():
    assert measure_overhead(ScriptedDispatcher()) == {
        "us_per_token": 20.0,
        "ms_per_request": 0.3,
        "requests": 2 * REQUESTS,
        "tokens": REQUESTS * (TOKENS + 1),
    }
