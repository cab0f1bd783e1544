"""When evaluations are due and when a target is met."""

import pytest

from paceline.core.errors import OptionError
from paceline.core.settings import Every, Target
from paceline.server.evaluation_schedule import Schedule, TargetWatch


def test_by_versions_and_by_epochs():
    versions = Schedule(Every.parse("3v"))
    assert [v for v in range(1, 11) if versions.due(v, 0.0)] == [3, 6, 9]
    epochs = Schedule(Every.parse("0.1e"))
    assert [e for e in (0.05, 0.1, 0.15, 0.35, 0.38, 0.4) if epochs.due(1, e)] == [0.1, 0.35, 0.4]
    seconds = Schedule(Every.parse("1s"))
    assert not seconds.due(1000, 1000.0)


def test_three_in_a_row_at_the_middle_ones_time():
    watch = TargetWatch(Target.parse("accuracy=0.9"))
    values = [0.5, 0.95, 0.7, 0.9, 0.92, 0.93]
    reached = [watch.record(float(at), {"accuracy": value}) for at, value in enumerate(values)]
    assert reached == [False, False, False, False, False, True]
    assert watch.reached_at == 4.0
    assert not watch.record(9.0, {"accuracy": 1.0})


def test_downwards_for_losses():
    watch = TargetWatch(Target.parse("val_loss=0.5"))
    assert [watch.record(float(at), {"val_loss": v}) for at, v in enumerate([0.4, 0.4, 0.4])] == [False, False, True]


def test_no_target_is_never_met_and_an_unknown_metric_is_named():
    assert not TargetWatch(None).record(0.0, {"accuracy": 1.0})
    with pytest.raises(OptionError, match="returns loss, top5"):
        TargetWatch(Target.parse("accuracy=0.9")).record(0.0, {"top5": 1.0, "loss": 1.0})
