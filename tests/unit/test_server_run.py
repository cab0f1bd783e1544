"""What every engine may rely on: a server run driven by hand, without a process, a thread or a clock of its own."""

import msgspec
import numpy as np
import pytest
from clusters import cluster, event
from hand_driven import BATCH, FIRST, LR, SIZE, HandDrivenRun, hello

from paceline.core.actions import Apply
from paceline.core.errors import CheckpointError, InternalError, OptionError, PeerError, ScriptError, UserError
from paceline.core.events import Joined, Left, Pushed, TimerFired
from paceline.core.settings import Every, Target
from paceline.engines import capabilities
from paceline.peers import messages as p
from paceline.peers.server import PeerExchange
from paceline.server.departures import RESPAWNS
from paceline.server.engine import EVALUATOR
from paceline.server.progress import ProgressReports
from paceline.server.run import GATHERING_S, MOST_ASKED, MOST_REMARKS, REMARK_LETTERS
from paceline.strategies import canonical
from paceline.tables import messages as t
from paceline.tables.server import TableExchange
from paceline.tables.table_spec import TableSpec
from paceline.transport.messages import (
    Cancelled,
    Ended,
    Evaluate,
    Evaluated,
    Extra,
    Failed,
    More,
    Note,
    OptionAsked,
    Over,
    Push,
    Ready,
    Remark,
    Stop,
    Welcome,
    Work,
)

# -- one phase ---------------------------------------------------------------------------------------------------------


def test_everybody_is_welcomed_once_all_have_prepared_their_models():
    hand = HandDrivenRun()
    assert hand.engine.started == [(0, 0), (1, 0)]
    hand.prepares(1)
    assert hand.engine.sent == {}
    hand.prepares(0)
    assert [hand.count(worker, Welcome) for worker in (0, 1)] == [1, 1]
    assert float(hand.last(1, Welcome).parameters.flat[0][0]) == FIRST


def test_a_phase_begins_once_all_have_called_batches():
    hand = HandDrivenRun()
    for worker in (0, 1):
        hand.prepares(worker)
    hand.engine.time = 3.0
    hand.is_ready(1)
    assert not hand.run.phases.running
    assert hand.engine.clock_started == []
    hand.is_ready(0)
    assert hand.engine.clock_started == [0.0]
    assert [hand.last(worker, Work).allotment.samples for worker in (0, 1)] == [BATCH, BATCH]
    assert [event for event in hand.events if isinstance(event, Joined)] == [
        Joined(3.0, 0, BATCH),
        Joined(3.0, 1, BATCH),
    ]


def test_a_bsp_run_from_its_first_message_to_its_last_line():
    hand = HandDrivenRun().train()
    seen = []
    for step in range(2):
        seen += [int(i) for worker in (0, 1) for i in hand.last(worker, Work).allotment.indices]
        hand.engine.time = step + 0.25
        hand.pushes(0, 1.0, compute_s=0.25)
        assert hand.run.coordinator.version == step
        hand.engine.time = step + 0.75
        hand.pushes(1, 3.0, compute_s=0.5)
        assert hand.run.coordinator.version == step + 1
        assert hand.model == FIRST - LR * 2.0 * (step + 1)
    assert sorted(seen) == list(range(SIZE))
    pushed = [event for event in hand.events if isinstance(event, Pushed)]
    assert [(e.at, e.worker, e.compute_s, e.transfer_s, e.wait_s) for e in pushed] == [
        (0.25, 0, 0.25, 0.0, 0.0), (0.75, 1, 0.5, 0.25, 0.0), (1.25, 0, 0.25, 0.25, 0.5), (1.75, 1, 0.5, 0.5, 0.0),
    ]  # fmt: skip
    for worker in (0, 1):
        over = hand.last(worker, Over)
        assert (over.phase, over.run_over, over.rounds_done) == (0, False, 2.0)
        assert float(over.parameters.flat[0][0]) == hand.model
    hand.engine.time = 9.0
    hand.ends(0)
    assert not hand.run.finished
    hand.ends(1)
    assert (hand.run.finished, hand.run.cause) == (True, "done")
    (end,) = hand.observed("end")
    assert end.at == 1.75  # the run's time stands still after its phase
    assert end.data == {"cause": "done", "versions": 2, "samples_used": SIZE, "samples_lost": 0}
    assert hand.lines[-1] is end
    times = [line.event.at if hasattr(line, "event") else line.at for line in hand.lines[1:]]
    assert times == sorted(times)


def test_a_push_that_is_applied_with_no_weight_is_forgotten():
    hand = HandDrivenRun().train()
    hand.pushes(0)
    (push,) = hand.run.coordinator.held
    hand.run.coordinator._apply(Apply((push,), (0.0,), "it counts for nothing"))
    assert hand.run.exchange.store._pushes == {}
    assert hand.run.coordinator.version == 0


def test_a_second_phase_begins_where_everybody_waits_for_it():
    hand = HandDrivenRun().train()
    for _ in range(2):
        for worker in (0, 1):
            hand.pushes(worker)
    hand.engine.time = 5.0
    for worker in (0, 1):
        hand.is_ready(worker, phase=1)
    assert [line.at for line in hand.observed("phase")] == [0.0, 5.0]
    assert hand.last(0, Work).phase == 1
    assert hand.engine.clock_started == [0.0]


def test_a_timer_between_two_phases_fires_at_its_own_time():
    hand = HandDrivenRun().train()
    hand.engine.time = 1.0
    for _ in range(2):
        for worker in (0, 1):
            hand.pushes(worker)
    hand.run.set_timer("again", 3.0, hand.run.coordinator.timers.set("again", 3.0))
    hand.engine.advance(5.0)
    assert [event for event in hand.events if isinstance(event, TimerFired)] == [TimerFired(3.0, "again")]


def test_a_worker_that_asks_for_a_phase_that_is_over_is_told_so():
    hand = HandDrivenRun().train()
    for _ in range(2):
        for worker in (0, 1):
            hand.pushes(worker)
    assert hand.count(0, Over) == 1
    hand.is_ready(0, phase=0)
    assert hand.count(0, Over) == 2


def test_a_worker_that_leaves_the_loop_gives_its_samples_back():
    hand = HandDrivenRun().train()
    hand.leaves_the_loop(1)
    assert Left(0.0, 1, "done") in hand.events
    for _ in range(4):
        hand.pushes(0)
    assert hand.run.coordinator.used == SIZE
    assert hand.over_for(0) is not None
    assert hand.over_for(1) is None


def test_a_phase_that_everybody_has_left_is_over_whatever_data_remains():
    hand = HandDrivenRun().train()
    for worker in (0, 1):
        hand.leaves_the_loop(worker)
    assert not hand.run.phases.running
    for worker in (0, 1):
        hand.is_ready(worker, phase=1)
    assert hand.run.phases.running


def test_a_script_may_end_the_phase_for_all():
    hand = HandDrivenRun().train()
    hand.says(1, Stop("enough"))
    assert [hand.count(worker, Over) for worker in (0, 1)] == [1, 1]
    assert hand.engine.recalled == [(0, 1), (1, 2)]
    assert "the script ended the phase: enough" in [line.data["text"] for line in hand.observed("warning")]


def test_further_samples_belong_to_the_grant_that_is_computed():
    hand = HandDrivenRun().train()
    ticket = hand.last(0, Work).ticket
    hand.says(0, More(ticket))
    assert hand.last(0, Extra).allotment.samples == BATCH
    hand.says(0, More(ticket + 99))
    assert hand.count(0, Extra) == 1
    hand.says(1, More(hand.last(1, Work).ticket))
    hand.says(0, More(ticket))
    assert hand.last(0, Extra).allotment is None


def test_the_limit_in_versions_ends_the_run():
    hand = HandDrivenRun(max_versions=1).train()
    for worker in (0, 1):
        hand.pushes(worker)
    assert (hand.run.cause, hand.run.stage) == ("limit", "finishing")
    assert hand.last(0, Over).run_over
    for worker in (0, 1):
        hand.ends(worker)
    assert hand.observed("end")[0].data["versions"] == 1


def test_the_limit_in_seconds_takes_running_grants_back():
    hand = HandDrivenRun(max_seconds=2.0).train()
    hand.engine.advance(1.9)
    assert hand.run.active
    hand.engine.advance(2.0)
    assert hand.run.cause == "limit"
    assert [line.data["cause"] for line in hand.observed("cancelled")] == ["stop", "stop"]


# -- who comes and goes ------------------------------------------------------------------------------------------------


def test_the_end_of_a_process_that_was_replaced_is_nobodys():
    hand = HandDrivenRun(respawn=True).train()
    hand.exits(1, -9)
    assert hand.engine.started[2:] == [(1, 1)]
    hand.comes(1)
    hand.prepares(1)
    hand.is_ready(1)
    before, present = list(hand.lines), sorted(hand.run.workers.alive)
    assert hand.run.workers.records[1].present
    hand.exits(1, -9, incarnation=0)
    hand.exits(1, 3, incarnation=0)
    assert list(hand.lines) == before
    assert sorted(hand.run.workers.alive) == present == [0, 1]
    assert hand.run.workers.records[1].present
    assert hand.engine.started[3:] == []


def test_what_a_process_said_that_was_replaced_is_not_heard():
    hand = HandDrivenRun(respawn=True).train()
    ticket = hand.last(1, Work).ticket
    hand.exits(1, -9)
    hand.comes(1)
    before = list(hand.lines)
    hand.says(1, Push(ticket, BATCH, None), incarnation=0)
    hand.says(1, Failed("script", "late", ""), incarnation=0)
    assert list(hand.lines) == before


def test_a_successor_that_is_announced_first_takes_its_predecessors_place():
    hand = HandDrivenRun().train()
    hand.run.on_start(1, 7)
    assert Left(0.0, 1, "crash") in hand.events
    hand.exits(1, -9, incarnation=0)
    assert hand.run.workers.incarnation(1) == 7


def test_the_others_go_on_without_a_worker_that_died():
    hand = HandDrivenRun().train()
    hand.pushes(0)
    hand.exits(1, -9)
    assert hand.run.coordinator.version == 1
    (warning,) = hand.observed("warning")
    assert (
        "worker 1 was killed by SIGKILL at 0 s; the others go on (--respawn would bring it back)"
        in warning.data["text"]
    )
    for _ in range(3):
        hand.pushes(0)
    assert hand.run.coordinator.used == SIZE


def test_processes_that_die_one_after_the_other_are_not_brought_back_for_ever():
    hand = HandDrivenRun(respawn=True).train()
    for _ in range(RESPAWNS):
        hand.exits(1, -9)
        if dict(hand.engine.started)[1] != hand.incarnations[1]:
            hand.comes(1)
    assert hand.engine.started[2:] == [(1, incarnation) for incarnation in range(1, RESPAWNS)]
    assert any("it is not started again" in line.data["text"] for line in hand.observed("warning"))


def test_a_newcomer_takes_the_place_of_a_worker_that_only_the_previous_server_knew():
    hand = HandDrivenRun(respawn=True).train()
    hand.run.on_unknown_exit(3, 0, 0, 0.0)  # its script has come to its end
    hand.run.on_unknown_exit(2, 4, -9, 0.0)
    assert hand.engine.started[2:] == [(2, 5)]
    hand.run.on_never_started(2, 5)
    hand.run.invite(None)
    hand.run.invite(None)
    assert hand.engine.started[3:] == [(2, 6), (4, 0)]


def test_a_script_that_fails_ends_the_run():
    hand = HandDrivenRun().train()
    with pytest.raises(ScriptError, match="the script of worker 1 exited with 3"):
        hand.exits(1, 3)
    with pytest.raises(ScriptError, match="no such file") as failed:
        hand.says(0, Failed("script", "no such file", "line 7"))
    assert failed.value.__notes__ == ["line 7"]
    hand.run.fail(failed.value)
    assert (hand.run.finished, hand.run.cause) == (True, "error")
    assert [line.what for line in hand.lines[-2:]] == ["error", "end"]


def test_a_checkpoint_that_cannot_be_completed_does_not_hide_what_went_wrong(monkeypatch):
    hand = HandDrivenRun().train()

    def finish():
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(hand.run.checkpoints, "finish", finish)
    hand.run.fail(ScriptError("no such file"))
    assert [(line.what, line.data.get("text")) for line in hand.lines[-2:]] == [
        ("error", "no such file"),
        ("end", None),
    ]


def test_the_loss_of_everybody_is_an_error_at_once():
    hand = HandDrivenRun().train()
    hand.exits(0, -9)
    with pytest.raises(PeerError, match="every worker's process has died by 0 s: --respawn"):
        hand.exits(1, -9)


def test_a_scenario_kills_sends_away_and_brings_back():
    events = event("crash", 1.0, worker=1) + event("rejoin", 2.0, worker=1) + event("leave", 3.0, worker=0)
    hand = HandDrivenRun(scenario=cluster(1.0, 1.0, events=events)).train()
    hand.engine.advance(1.0)
    assert hand.engine.controlled == [(1, "kill")]
    hand.exits(1, -9)
    assert hand.observed("warning") == []  # that was meant to happen
    hand.engine.advance(2.0)
    assert hand.engine.started[2:] == [(1, 1)]
    hand.comes(1)
    hand.prepares(1)
    hand.is_ready(1)
    hand.engine.advance(3.0)
    assert hand.engine.controlled[1:] == [(0, "hang_up")]
    assert Left(3.0, 0, "leave") in hand.events
    assert [line.at for line in hand.observed("scenario")] == [1.0, 2.0, 3.0]


# -- another exchange --------------------------------------------------------------------------------------------------

COUNTS = TableSpec("counts", 4, 1, "float32", None, "add", eager=False)
CLOCKS = Ready(0, 1 << 40, 1, 1, "clocks", 1)


def on_tables(strategy="bsp", **settings):
    """Two workers that have opened a table and called for its work to begin."""
    hand = HandDrivenRun(strategy, **settings)
    for worker in (0, 1):
        hand.says(worker, t.OpenTable(COUNTS))
    assert hand.last(0, t.Opened).wanted
    hand.says(0, t.TableInit(0, np.arange(4, dtype=np.float32)[:, None]))
    assert not hand.last(1, t.Opened).wanted
    for worker in (0, 1):
        hand.says(worker, CLOCKS)
    return hand


def tick(through, row, amount):
    return t.Tick(through, 1, [t.TableLog(0, np.array([row]), np.array([[amount]], dtype=np.float32))])


def test_the_first_message_about_tables_changes_the_exchange():
    hand = HandDrivenRun()
    before = hand.run.exchange
    hand.says(0, t.OpenTable(COUNTS))
    assert isinstance(hand.run.exchange, TableExchange)
    assert hand.run.exchange is not before
    assert hand.run.coordinator.updates is hand.run.exchange.store


def test_a_run_on_tables_from_its_first_message_to_its_last_line():
    hand = on_tables()
    assert [hand.count(worker, t.Entered) for worker in (0, 1)] == [1, 1]
    hand.says(0, t.Fetch(0, 0, None))
    assert hand.last(0, t.Rows).values[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    hand.engine.time = 0.5
    hand.says(0, tick(1, 2, 10.0))
    hand.says(0, t.Fetch(0, 1, None))
    assert hand.count(0, t.Rows) == 1  # bsp: not before the other one's clock is in
    hand.engine.time = 1.0
    hand.says(1, tick(1, 3, 100.0))
    assert hand.last(0, t.Rows).values[:, 0].tolist() == [0.0, 1.0, 12.0, 103.0]
    assert hand.run.coordinator.version == 1
    for worker in (0, 1):
        hand.ends(worker)
    assert (hand.run.finished, hand.run.cause) == (True, "done")
    assert hand.run.result().tables["counts"][:, 0].tolist() == [0.0, 1.0, 12.0, 103.0]
    assert hand.run.result().model is None


def test_a_run_does_not_change_over_once_it_has_a_model_or_tables():
    hand = HandDrivenRun().train()
    with pytest.raises(PeerError, match="OpenTable belongs to another exchange"):
        hand.says(0, t.OpenTable(COUNTS))
    with pytest.raises(UserError, match="worker 1 prepares a model, others open tables"):
        on_tables().prepares(1)


def test_a_strategy_that_serves_no_tables_says_so():
    with pytest.raises(OptionError, match="dasp does not work on tables: choose .*ssp"):
        HandDrivenRun("dasp").says(0, t.OpenTable(COUNTS))
    with pytest.raises(OptionError, match="gossip has no server that could keep tables"):
        HandDrivenRun("gossip", exchanges=[PeerExchange, TableExchange]).says(0, t.OpenTable(COUNTS))


def test_a_message_without_a_meaning_is_an_error_of_its_sender():
    with pytest.raises(PeerError, match="which no exchange handles"):
        HandDrivenRun(exchanges=[TableExchange]).says(0, p.Mailbox("somewhere", "key"))


# -- interrupts --------------------------------------------------------------------------------------------------------


def interrupted(hand):
    hand.run.interrupt(hand.engine.time)
    hand.run.attend(hand.engine.time)


def assert_interrupted(hand):
    assert (hand.run.finished, hand.run.cause) == (True, "interrupted")
    (end,) = hand.observed("end")
    assert end.data["cause"] == "interrupted"
    assert hand.lines[-1] is end


def test_an_interrupt_before_anybody_has_come_ends_the_run():
    hand = HandDrivenRun()
    interrupted(hand)
    assert_interrupted(hand)


def test_an_interrupt_while_it_trains_ends_the_run_without_waiting_for_scripts():
    hand = HandDrivenRun().train()
    hand.pushes(0)
    hand.engine.time = 1.5
    interrupted(hand)
    assert_interrupted(hand)
    assert [line.data["samples"] for line in hand.observed("discarded")] == [BATCH]
    assert [line.data["samples"] for line in hand.observed("cancelled")] == [BATCH]
    assert hand.observed("end")[0].at == 1.5
    assert hand.over_for(0) is None
    assert hand.model == FIRST


def test_an_interrupt_while_scripts_come_to_their_end():
    hand = HandDrivenRun(max_versions=1).train()
    for worker in (0, 1):
        hand.pushes(worker)
    assert hand.run.stage == "finishing"
    interrupted(hand)
    assert_interrupted(hand)
    assert hand.run.result().model is not None


def gathering():
    """Two nodes at their run's limit, which are asked for their models."""
    hand = HandDrivenRun("local_sgd", exchanges=[PeerExchange], max_versions=2)
    for node in (0, 1):
        hand.says(node, p.Mailbox("somewhere", "key"))
    hand.train()
    for node in (0, 1):
        hand.pushes(node)
    assert (hand.run.stage, hand.run.cause) == ("gathering", "limit")
    assert [hand.last(node, p.Collect).last for node in (0, 1)] == [True, True]
    return hand


def answers(hand, node, value):
    number = hand.last(node, p.Collect).number
    hand.says(node, p.Snapshot(number, [np.full(1, value, np.float32).view(np.uint8)], []))


def test_models_that_are_together_let_scripts_come_to_their_end():
    hand = gathering()
    answers(hand, 0, 1.0)
    assert hand.run.stage == "gathering"
    answers(hand, 1, 2.0)
    assert (hand.run.stage, hand.model) == ("finishing", 1.5)
    assert hand.last(0, Over).run_over


def test_an_interrupt_while_models_come_together_waits_for_them_a_while():
    hand = gathering()
    interrupted(hand)
    assert hand.run.stage == "gathering"
    for node, value in ((0, 1.0), (1, 2.0)):
        answers(hand, node, value)
    assert_interrupted(hand)
    assert hand.model == 1.5


@pytest.mark.parametrize("first", [True, False])
def test_an_interrupt_does_not_wait_for_models_for_ever(first):
    hand = gathering()
    if first:
        answers(hand, 0, 1.0)
    hand.engine.time = 4.0
    interrupted(hand)
    hand.engine.advance(4.0 + GATHERING_S - 0.01)
    assert hand.run.stage == "gathering"
    hand.engine.advance(4.0 + GATHERING_S)
    assert_interrupted(hand)


def test_an_interrupt_of_a_finished_run_changes_nothing():
    hand = HandDrivenRun().train()
    for _ in range(2):
        for worker in (0, 1):
            hand.pushes(worker)
    for worker in (0, 1):
        hand.ends(worker)
    before = list(hand.lines)
    interrupted(hand)
    assert (hand.run.cause, list(hand.lines)) == ("done", before)


def test_breaking_off_says_so_in_the_journal_alone():
    hand = HandDrivenRun().train()
    sent = {worker: len(messages) for worker, messages in hand.engine.sent.items()}
    hand.run.break_off()
    assert_interrupted(hand)
    assert {worker: len(messages) for worker, messages in hand.engine.sent.items()} == sent


# -- evaluations -------------------------------------------------------------------------------------------------------


def evaluated(**settings):
    """A run that waits for its evaluator's process, which is ready."""
    hand = HandDrivenRun(own_processes=True, evaluate_every=Every.parse("1v"), **settings)
    hand.incarnations[EVALUATOR] = 0
    for worker in (0, 1):
        hand.prepares(worker)
        hand.is_ready(worker)
    assert not hand.run.phases.running
    return hand


def test_an_evaluator_with_another_model_is_called_by_its_name():
    hand = evaluated()
    given = hello()
    other = msgspec.structs.replace(given.spec, parameters=(("w", (2,), "torch.float32"),))
    with pytest.raises(OptionError, match="the evaluator"):
        hand.says(EVALUATOR, msgspec.structs.replace(given, spec=other))


def test_nobody_begins_before_the_evaluator_is_ready():
    hand = evaluated()
    hand.says(EVALUATOR, hello())
    assert hand.run.phases.running
    assert hand.last(EVALUATOR, Evaluate).number == 1


def test_numbers_are_those_of_the_time_at_which_their_version_was_taken():
    hand = evaluated()
    hand.says(EVALUATOR, hello())
    for worker in (0, 1):
        hand.engine.time += 1.0
        hand.pushes(worker)
    assert hand.count(EVALUATOR, Evaluate) == 1  # one at a time
    hand.says(EVALUATOR, Evaluated(1, {"loss": 4.0}))
    assert hand.count(EVALUATOR, Evaluate) == 2
    hand.engine.time = 2.5
    hand.says(EVALUATOR, Evaluated(2, {"loss": 3.0}))
    hand.says(EVALUATOR, Evaluated(7, {"loss": 0.0}))  # an answer that nobody waits for
    taken = [(line.at, line.data["version"], line.data["metrics"]["loss"]) for line in hand.observed("evaluation")]
    assert taken == [(0.0, 0, 4.0), (2.0, 1, 3.0)]


def test_the_last_version_is_measured_before_the_run_is_finished():
    hand = evaluated(max_versions=1)
    hand.says(EVALUATOR, hello())
    hand.says(EVALUATOR, Evaluated(1, {"loss": 4.0}))
    for worker in (0, 1):
        hand.pushes(worker)
    for worker in (0, 1):
        hand.ends(worker)
    assert hand.run.stage == "finishing"
    hand.says(EVALUATOR, Evaluated(2, {"loss": 3.0}))
    assert hand.run.finished
    assert (EVALUATOR, "hang_up") in hand.engine.controlled


@pytest.mark.parametrize("code", [0, -9])
def test_a_run_goes_on_without_its_evaluator_unless_it_has_a_target(code):
    hand = evaluated()
    hand.says(EVALUATOR, hello())
    hand.exits(EVALUATOR, code)
    assert len(hand.observed("warning")) == (code != 0)
    for _ in range(2):
        for worker in (0, 1):
            hand.pushes(worker)
    for worker in (0, 1):
        hand.ends(worker)
    assert hand.run.cause == "done"
    hand = evaluated(target=Target.parse("loss=0.5"))
    hand.says(EVALUATOR, hello())
    with pytest.raises(PeerError, match="the target loss.* can no longer be checked"):
        hand.exits(EVALUATOR, -9)


# -- what scripts say --------------------------------------------------------------------------------------------------


def test_notes_and_remarks_are_on_record_and_a_remark_once():
    hand = HandDrivenRun().train()
    hand.engine.time = 2.0
    hand.says(1, Note("temperature", 36.6))
    (note,) = hand.observed("report")
    assert (note.at, note.worker, note.data) == (2.0, 1, {"name": "temperature", "value": 36.6})
    for worker in (0, 1):
        hand.says(worker, Remark("odd"))
    assert [line.data["text"] for line in hand.observed("warning")] == ["odd"]


def test_what_workers_say_is_kept_up_to_a_number_and_a_length():
    hand = HandDrivenRun().train()
    for number in range(MOST_REMARKS + 10):
        hand.says(0, Remark(f"{number}" + "x" * REMARK_LETTERS))
    texts = [line.data["text"] for line in hand.observed("warning")]
    assert (len(texts), texts[-1]) == (MOST_REMARKS + 1, "further warnings are left out")
    assert max(map(len, texts)) == REMARK_LETTERS
    for number in range(MOST_ASKED + 10):
        hand.says(0, OptionAsked(f"{number}" + "x" * REMARK_LETTERS))
    assert len(hand.run.words.asked) == MOST_ASKED
    assert max(map(len, hand.run.words.asked)) == REMARK_LETTERS


def test_a_worker_whose_message_does_not_fit_is_spared_while_a_phase_runs_and_nothing_is_half_done(monkeypatch):
    hand = HandDrivenRun()
    assert not hand.run.departures.can_spare(0)
    hand.engine.capabilities = capabilities("hosts")
    assert not hand.run.departures.can_spare(0)
    hand.train()
    assert hand.run.departures.can_spare(0)
    with pytest.raises(PeerError, match="which no exchange handles"):
        hand.says(0, Welcome(None, None))
    assert hand.run.departures.can_spare(0)
    hand.pushes(0)
    monkeypatch.setattr(hand.engine, "dispatch", lambda *_: [].pop())
    with pytest.raises(IndexError):
        hand.pushes(1)
    assert not hand.run.departures.can_spare(0)


def test_an_option_that_no_script_asks_for_ends_the_run():
    hand = HandDrivenRun(options={"width": "3", "depht": "2"}).train()
    for name in ("width", "depth"):
        hand.says(0, OptionAsked(name))
    hand.pushes(0)
    with pytest.raises(OptionError, match="--set depht: the script asks for no such option; it asks for: depth, width"):
        hand.pushes(1)


def test_a_diverging_run_goes_on_under_bsp():
    hand = HandDrivenRun("asp", on_divergence="bsp").train()
    hand.run.on_divergence("it diverges")
    hand.run.attend(1.0)
    assert canonical(hand.run.coordinator.strategy) == "bsp"
    assert [message.ticket for message in hand.engine.sent[0] if isinstance(message, Work)] == [1, 3]
    assert not hand.count(0, Cancelled)  # the engine says so in its own words
    assert hand.engine.recalled == [(0, 1), (1, 2)]


@pytest.mark.parametrize("action", ["stop", "bsp"])
def test_divergence_does_not_replace_an_earlier_cause_of_the_end(action):
    hand = HandDrivenRun("asp", on_divergence=action).train()
    hand.run.end("target")
    hand.run.on_divergence("it diverges")
    hand.run.attend(1.0)
    assert hand.run.cause == "target"
    assert canonical(hand.run.coordinator.strategy) == "asp"


def test_a_push_that_is_not_finite_is_refused_or_ends_the_run():
    hand = HandDrivenRun().train()
    hand.pushes(0, float("nan"))
    assert hand.run.active
    assert hand.run.coordinator.lost == BATCH
    hand = HandDrivenRun(on_nonfinite="stop").train()
    hand.pushes(0, float("inf"))
    assert hand.run.cause == "divergence"


def test_progress_comes_to_the_end_although_samples_were_lost(monkeypatch):
    monkeypatch.setattr("paceline.server.progress.PAUSE_S", -1.0)
    hand, shown = HandDrivenRun(workers=1).train(), []
    reports = ProgressReports(hand.run, shown.append)
    for value in (float("nan"), 1.0, 1.0):
        hand.pushes(0, value)
    reports.on_version(2, 1.0)
    hand.pushes(0, 1.0)
    hand.is_ready(0, phase=1)
    reports.on_version(3, 1.0)
    assert [(p.samples_used, p.samples_lost, p.total_samples) for p in shown] == [
        (2 * BATCH, BATCH, SIZE),
        (SIZE - BATCH, BATCH, 2 * SIZE),
    ]


def test_workers_that_all_wait_for_ever_are_an_error():
    hand = HandDrivenRun().train()
    hand.run.on_quiet(1.0)  # both compute
    for record in hand.run.workers.records.values():
        record.ticket = 0
    with pytest.raises(InternalError, match=r"bsp lets workers \[0, 1\] wait for ever at 1 s"):
        hand.run.on_quiet(1.0)


def test_a_script_without_a_loop_is_told_that_nothing_was_trained():
    hand = HandDrivenRun()
    for worker in (0, 1):
        hand.prepares(worker)
    for worker in (0, 1):
        hand.says(worker, Ended())
        hand.exits(worker)
    assert hand.run.finished
    assert any("no worker called session.batches()" in line.data["text"] for line in hand.observed("warning"))
