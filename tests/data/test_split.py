from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.data import split_tokens
from hybridpar.errors import ConfigError


def test_cut_between_documents(make_indexed):
    indexed = make_indexed([[3, 4]] * 100)  # documents of 7 tokens
    assert split_tokens(indexed, 0.1, 1) == ((0, 630), (630, 700))
    assert split_tokens(indexed, 0.105, 1) == ((0, 623), (623, 700))
    assert split_tokens(indexed, 0.01, 1) == ((0, 693), (693, 700))


def test_cut_between_sentences_where_documents_are_too_long(make_indexed):
    assert split_tokens(make_indexed([[10] * 40, [10] * 40]), 0.05, 1) == ((0, 760), (760, 800))


def test_cut_inside_a_single_text(make_indexed):
    assert split_tokens(make_indexed([[1000]]), 0.02, 1) == ((0, 980), (980, 1000))


def test_without_validation(make_indexed):
    assert split_tokens(make_indexed([[9]]), 0, 1) == ((0, 9), None)


@given(st.floats(0.001, 0.9), st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_the_share_is_half_to_twice_what_was_asked(fraction, sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    index = SimpleNamespace(
        prefix="x", num_tokens=starts[-1], document_starts=starts, sequence_starts=starts
    )
    try:
        (start, cut), (again, total) = split_tokens(index, fraction, 1)
    except ConfigError:
        assert round(fraction * starts[-1]) in (0, starts[-1])
        return
    assert (start, again, total) == (0, cut, starts[-1])
    assert fraction / 2 - 1 / total <= (total - cut) / total <= fraction * 2 + 1 / total


def test_too_small_a_part_names_a_share_that_works(make_indexed):
    indexed = make_indexed([[10]] * 100)
    with pytest.raises(
        ConfigError, match=r"data\.split = 0\.02: .* into 980 and 20 tokens, .* 65; try"
    ) as caught:
        split_tokens(indexed, 0.02, 65)
    better = float(caught.value.problems[0].suggestion)
    assert split_tokens(indexed, better, 65)[1] == (870, 1000)
    with pytest.raises(ConfigError, match="no validation"):
        split_tokens(indexed, 0.02, 600)
    with pytest.raises(ConfigError, match=r"try more text, or a smaller model\.seq_length"):
        split_tokens(indexed, 0.02, 1001)
