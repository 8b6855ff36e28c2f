"""LSPs over the positions of the window: found where they are, not where there is none, and told."""

import numpy as np
import pytest
from lsp_pages import LspPage
from scipy import sparse

from mlsm.commands.show_lsp import show as summary
from mlsm.evaluation.inspection.lsps import show as showing
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.lsps.positions import BINS, position_profiles, word_information
from mlsm.evaluation.inspection.lsps.sample import Sample
from mlsm.evaluation.inspection.lsps.text_pages import write
from mlsm.evaluation.inspection.lsps.view import StoreView
from mlsm.terminal.tables import sparkline

K, LENGTH, WINDOWS, WORDS = 6, 62, 400, 40


@pytest.fixture(scope="module")
def made_up():
    """LSP 0 fires in the first ten positions, 1 with even words, 2 with odd ones, 3 everywhere, 4 in runs anywhere."""
    rng = np.random.default_rng(3)
    position_N = np.tile(np.arange(1, LENGTH - 1), WINDOWS)
    window_N = np.repeat(np.arange(WINDOWS), LENGTH - 2)
    ids_N = rng.integers(0, WORDS, len(position_N))
    run_N = np.abs(position_N - np.repeat(rng.integers(1, LENGTH - 1, WINDOWS), LENGTH - 2)) < 6
    weights_NK = np.stack(
        [
            2.0 * (position_N <= 10),
            ids_N % 2 == 0,
            ids_N % 2 == 1,
            np.full(len(ids_N), 0.7),
            run_N,
            np.zeros(len(ids_N)),
        ],
        axis=1,
    )
    rows = sparse.csr_array(weights_NK / weights_NK.sum(1, keepdims=True))
    return Sample(
        ids_N.astype(np.int32),
        window_N,
        position_N,
        window_N,
        rows.indptr.astype(np.int64),
        rows.indices.astype(np.uint16),
        rows.data.astype(np.float32),
        K,
        len(ids_N),
    )


def test_profiles_are_mean_weights_by_part_of_the_window(made_up):
    found = position_profiles(made_up)
    dense_NK = sparse.csr_array((made_up.weights_E, made_up.lsps_E, made_up.indptr), (len(made_up), K)).toarray()
    stops = [*found.starts_B[1:], LENGTH]
    assert len(stops) == BINS
    for part, (start, stop) in enumerate(zip(found.starts_B, stops, strict=True)):
        at = (made_up.position_N >= start) & (made_up.position_N < stop)
        expected = dense_NK[at].mean(0)[:5] / dense_NK.mean(0)[:5]
        assert found.profile_KB[:5, part] == pytest.approx(expected, rel=1e-3)


def test_only_what_follows_the_position_is_called_positional(made_up):
    found = position_profiles(made_up)
    assert found.positional_K.tolist() == [True, False, False, False, False, False]
    assert found.nats_K[0] == pytest.approx(np.log(6), abs=0.15)  # ten of sixty positions
    assert (found.nats_K[1:] < 0.08).all() and found.nats_K[5] == 0


def test_runs_at_random_places_are_no_positions(made_up):
    """They would be with a null that shuffles single tokens, where few windows have the LSP."""
    few = made_up.window_N < 12
    rows = made_up.rows(np.flatnonzero(few))
    sample = Sample(
        made_up.ids_N[few], made_up.window_N[few], made_up.position_N[few], made_up.window_N[few], *rows, K, 1
    )
    assert not position_profiles(sample).positional_K[4]


def test_information_is_of_words_and_not_of_positions(made_up):
    found = word_information(made_up, position_profiles(made_up), WORDS)
    assert set(np.argsort(-found)[:2]) == {1, 2} and found[[0, 3, 4, 5]].max() < 0.02 < found[[1, 2]].min()


def test_sparklines():
    assert sparkline(np.array([0.0, 0.5, 1.0, 2.0])) == "▁▃▅█" and sparkline(np.zeros(3)) == "▁▁▁"


def test_terminal_and_pages_tell_them(hostile_store, tmp_path):
    view = StoreView(hostile_store, 2_000_000)
    result = showing.show(ShowLspConfig(store=str(hostile_store.path)), lambda *_, **__: None)
    first = result["rows"][0]
    assert first["clarity"] == max(view.clarity) and len(first["profile"]) <= BINS
    text = summary(result, None)
    assert "The easiest to recognise. Clarity is" in text and sparkline(first["profile"]) in text
    assert f"{result['positional']:,} LSPs, {result['positional_mass']:.1%} of the mass (marked *)" in text
    single = summary({"view": "lsps", **view.facts(), "lsps": [view.lsp(first["lsp"])]}, None)
    assert "over the window" in single and f"{first['information']:.4f} nats per token by the word" in single
    write(view, tmp_path / "pages")
    page = LspPage(tmp_path / "pages")
    assert len(page.lsp(first["lsp"])["profile"]) == len(first["profile"])
    assert page.lsps["information"][first["lsp"]] == round(first["information"], 6)
