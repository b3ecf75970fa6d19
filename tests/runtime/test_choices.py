"""What a row of logits says of a token: its own logit, and the best."""

from __future__ import annotations

import numpy as np

from skote.runtime.choices import choices


def test_the_token_s_own_logit_and_the_best_of_its_row() -> None:
    found = choices(np.array([[0.5, 3.0, -1.0], [2.0, 2.0, 0.0], [np.nan, 0.0, 1.0]], dtype=np.float32), (0, 1, 2))

    assert found.vocab == 3
    assert found.chosen.tolist() == [0.5, 2.0, 1.0]
    assert found.best[:2].tolist() == [3.0, 2.0]
    assert np.isnan(found.best[2])
