"""The public surface is small, sorted and what it says."""

import pytest

import paceline


def test_all_is_sorted_and_everything_in_it_exists():
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert callable(paceline.launch)
    assert callable(paceline.init)


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="lunch"):
        paceline.lunch  # noqa: B018
