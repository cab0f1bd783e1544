"""A run that was broken off goes on as if it never had been; folders appear whole; what cannot be read is named."""

import json
import math
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hand_driven import HandDrivenRun, hello
from interrupted import OPTIMIZERS, WORKERS, InterruptedRun, linear_store
from safetensors.torch import load_file

from paceline import strategies
from paceline.core.actions import Grant
from paceline.core.errors import CheckpointError, InternalError
from paceline.core.events import Left
from paceline.core.settings import Every
from paceline.model.mass_optimizer import OptimizerSpec
from paceline.model.spec import ModelSpec
from paceline.model.store import MODEL, Gradient, Store, spec_of_contents, store_of
from paceline.records import journal, metrics
from paceline.records.journal import Decision, Header, Line, Lines, Writer
from paceline.records.replay import replay
from paceline.server.checkpoint.files import FORMAT, HEAD, Checkpointer, newest, newest_whole, read
from paceline.server.checkpoint.run_snapshot import snapshot
from paceline.tables.messages import OpenTable, TableInit, Tick
from paceline.tables.table_spec import TableSpec
from paceline.transport.messages import Ready, SavedState, Welcome, Work

SAMPLINGS = ("epoch", "shard", "replacement")


def identical(one: InterruptedRun, other: InterruptedRun) -> bool:
    pairs = list(zip(one.state(), other.state(), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def continued(run: InterruptedRun, optimizer: str, folder: Path, chance: int = 1, sink=None) -> InterruptedRun:
    checkpoint = read(run.save(folder))
    return InterruptedRun(
        "bsp", optimizer, run.sampling, run.epochs, run.size, checkpoint=checkpoint, chance=chance, sink=sink
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_bsp_broken_off_after_any_event_ends_bit_identical(tmp_path, sampling, optimizer):
    """53 samples in rounds of 16: the second epoch begins in the middle of a round."""
    whole = InterruptedRun("bsp", optimizer, sampling).finish()
    assert whole.coordinator.version >= 6
    events = borders = 0
    while True:
        run = InterruptedRun("bsp", optimizer, sampling).steps(events)
        if run.over:
            break
        resumed = continued(run, optimizer, tmp_path / "checkpoints").finish()
        assert identical(whole, resumed), f"broken off after {events} events"
        assert resumed.coordinator.version == whole.coordinator.version
        assert resumed.coordinator.totals.rounds_done == pytest.approx(whole.coordinator.totals.rounds_done)
        assert (resumed.coordinator.used, resumed.coordinator.lost) == (whole.coordinator.used, 0)
        borders += not run.coordinator.held
        events += 1
    assert events > 20
    assert borders >= whole.coordinator.version  # right after every version among them, and before the first


def test_it_may_be_broken_off_again_and_again(tmp_path):
    whole = InterruptedRun("bsp", "adamw", "epoch").finish()
    run = InterruptedRun("bsp", "adamw", "epoch")
    for chance in range(40):
        if run.steps(3).over:
            break
        run = continued(run, "adamw", tmp_path / "checkpoints", chance)
    assert identical(whole, run.finish())


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{n}:k=3" if n in ("fastest_k", "k_async") else n for n in strategies.names()])
def test_every_strategy_goes_on_and_settles_every_sample(tmp_path, name):
    for events in (1, 6, 13, 22, 31):
        lines = Lines()
        run = InterruptedRun(name, "momentum", "epoch", epochs=3, sink=lines)
        if run.steps(events).over:
            continue
        used = _samples_applied(run)
        resumed = continued(run, "momentum", tmp_path / "checkpoints", sink=Lines())
        assert resumed.coordinator.version == run.coordinator.version
        resumed.finish()
        assert used + _samples_applied(resumed) == resumed.coordinator.used == 3 * 53
        assert all(math.isfinite(float(value.double().sum())) for value in resumed.state())


def _samples_applied(run: InterruptedRun) -> int:
    fold = metrics.fold(run.sink)
    header = run.sink[0]
    return fold.samples_used - (header.restored.samples_used if header.restored else 0)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", ["bsp", "fastest_k:k=2", "ssp", "dasp", "balanced", "adaptive_sync"])
def test_the_journal_goes_on_and_replays_across_the_break(tmp_path, name, compressed):
    path = tmp_path / ("journal.jsonl.gz" if compressed else "journal.jsonl")
    writer = Writer(path)
    run = InterruptedRun(name, "momentum", "epoch", epochs=4, sink=writer)
    run.steps(15)
    place = run.save(tmp_path / "checkpoints")
    kept = run.coordinator.version, run.coordinator.used, run.coordinator.totals.pushes
    run.steps(10)
    reached = run.coordinator.version, run.coordinator.used, run.coordinator.totals.pushes
    back = run.at + 5.0  # the restart takes a while
    writer.close()
    _cut_last_line(path, compressed)

    before = metrics.fold(_lines(path))
    writer = Writer(path, append=True)
    resumed = InterruptedRun(
        name, "momentum", "epoch", epochs=4, sink=writer, checkpoint=read(place), chance=9, at=back
    )  # fmt: skip
    data = before.beyond(read(place).run.restored)
    assert 0 <= data["versions"] <= reached[0] - kept[0]
    assert data["samples"] > 0
    assert 0 < data["pushes"] <= reached[2] - kept[2]
    resumed.coordinator.observe(back, "rolled_back", data)
    resumed.finish()
    writer.close()

    outcome = replay(path)
    assert outcome.difference is None
    fold = metrics.fold(_lines(path))
    assert fold.ended == "done"
    assert (fold.versions, fold.samples_used) == (resumed.coordinator.version, 4 * 53)
    assert fold.pushes == resumed.coordinator.totals.pushes
    assert fold.samples_discarded >= before.samples_discarded + data["samples"]
    assert fold.report(None).seconds == resumed.at
    for present, accounted in fold.time_law().values():
        assert 0 < present < resumed.at - 4.9
        assert accounted == pytest.approx(present)


def _lines(path: Path) -> list[Line]:
    return list(journal.read(path))


def _cut_last_line(path: Path, compressed: bool) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: -30 if compressed else -7])


def test_a_journal_of_nothing_but_half_a_line_starts_over(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"type":"head')
    writer = Writer(path, append=True)
    header = Header(engine="local", strategy="bsp", seed=0, workers=1)
    writer.write(header)
    writer.close()
    assert _lines(path) == [header]
    Writer(tmp_path / "fresh", append=True).close()
    assert (tmp_path / "fresh").read_bytes() == b""


def test_the_strategy_is_told_that_its_workers_are_gone_before_anybody_joins(tmp_path):
    run = InterruptedRun("bsp", "momentum", "epoch")
    run.steps(6)
    lines = Lines()
    continued(run, "momentum", tmp_path, sink=lines)
    header, *decisions = lines
    assert header.restored.version == run.coordinator.version
    assert (header.restored.samples_used, header.restored.pushes) == (
        run.coordinator.used,
        run.coordinator.totals.pushes,
    )
    assert [line.event for line in decisions[:WORKERS]] == [Left(run.at, w, "crash") for w in range(WORKERS)]
    granted = [a.worker for line in decisions[WORKERS:] for a in line.actions if isinstance(a, Grant)]
    assert granted == list(range(WORKERS))


def test_a_snapshot_leaves_the_run_undisturbed():
    alone, watched = (InterruptedRun("k_async:k=3", "momentum", sampling) for sampling in ("shard", "shard"))
    while not watched.over:
        alone.step()
        watched.step()
        snapshot(watched.coordinator, watched.at)
    assert identical(alone.finish(), watched.finish())


def test_a_snapshot_in_mid_decision_is_refused():
    run = InterruptedRun("bsp", "momentum", "epoch")
    run.on_version.append(lambda _, at: snapshot(run.coordinator, at))
    with pytest.raises(InternalError, match="middle of a decision"):
        run.finish()


def test_the_snapshot_is_plain_data(tmp_path):
    run = InterruptedRun("adaptive_sync", "adamw", "replacement")
    run.steps(9)
    place = run.save(tmp_path)
    data = json.loads((place / HEAD).read_text())
    assert data["run"] == json.loads(json.dumps(msgspec.to_builtins(read(place).run)))
    assert sum(map(len, data["run"]["ledger"]["again"])) == sum(
        held.samples for held in run.coordinator.held.values()
    ) + sum(order.allotment.samples for order, _ in run.orders.values())


# -- folders -----------------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, events: int = 5) -> tuple[InterruptedRun, Path]:
    run = InterruptedRun("bsp", "momentum", "epoch")
    run.steps(events)
    return run, run.save(tmp_path / "checkpoints")


def test_a_runs_folder_its_checkpoints_and_one_of_them_are_all_accepted(tmp_path):
    run, first = saved(tmp_path)
    run.steps(4)
    second = run.save(tmp_path / "checkpoints")
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["v000000001", "v000000002"]
    assert newest(tmp_path) == newest(tmp_path / "checkpoints") == newest(second) == second
    assert newest(first) == first
    assert read(tmp_path).run.version == 2
    assert read(first).run.version == 1
    assert [read(tmp_path).state(worker) for worker in (0, 3, 4)] == [b"state of 0", b"state of 3", None]
    assert read(tmp_path).workers == [0, 1, 2, 3]
    assert read(tmp_path).head.engine == {"phase": 0}


def test_the_newest_are_kept(tmp_path):
    run = InterruptedRun("ssp", "momentum", "epoch")
    for _ in range(6):
        run.steps(1).save(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000000005", "v000000006"]


def test_leftovers_of_a_killed_writer_are_ignored_and_removed(tmp_path):
    run, first = saved(tmp_path)
    folder = first.parent
    run.steps(4)
    writer = Checkpointer(folder, 3)
    writer.begin(snapshot(run.coordinator, run.at), run.store.contents(), {}, [0])
    del writer  # killed before the worker's state came
    shutil.copytree(first, folder / ".writing-v000000009")
    (folder / ".removing-v000000001").mkdir()
    (folder / "v000000007").mkdir()  # without a head it is nobody's checkpoint
    assert newest(tmp_path) == first
    run.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["v000000001", "v000000002", "v000000007"]


def test_a_checkpoint_is_not_there_before_its_last_state(tmp_path):
    run, _ = saved(tmp_path)
    run.steps(4)
    folder = tmp_path / "later"
    writer = Checkpointer(folder, 3)
    writer.begin(snapshot(run.coordinator, run.at), run.store.contents(), {}, [0, 1, 2])
    assert writer.waiting == {0, 1, 2}
    assert not writer.state(2, 0, b"zero")
    assert not writer.state(1, 1, b"of another checkpoint")
    assert not writer.gone(1)
    assert newest(folder) is None
    assert writer.state(2, 2, b"two")
    assert writer.complete() == folder / "v000000002"
    assert read(folder).workers == [0, 2]
    with pytest.raises(CheckpointError, match="no checkpoint under way"):
        writer.complete()
    writer.begin(snapshot(run.coordinator, run.at), run.store.contents(), {}, [])
    writer.abandon()
    assert [path.name for path in folder.iterdir()] == ["v000000002"]


def test_the_same_version_again_replaces_the_first(tmp_path):
    run, first = saved(tmp_path)
    for number in (1, 2):
        run.coordinator.totals.pushes += 100
        second = run.save(first.parent)
        assert [path.name for path in first.parent.iterdir()] == [f"v000000001.{number}"]
        assert newest(tmp_path) == second
        assert read(second).run.pushes > 100 * number


def test_the_model_loads_into_the_plain_module(tmp_path):
    run, place = saved(tmp_path)
    module = torch.nn.Linear(5, 3)
    module.register_buffer("seen", torch.tensor(0))
    module.register_buffer("mean", torch.zeros(3))
    module.load_state_dict(load_file(place / MODEL))
    assert torch.equal(module.weight, run.store.snapshot().parameters["weight"])
    assert int(module.seen) == int(run.store.snapshot().buffers["seen"]) > 0


def test_half_precision_tied_and_unsaved_tensors_come_back_exactly(tmp_path):
    values = [torch.randn(6, 2).bfloat16(), torch.randn(3), torch.randn(4).half()]
    options = {"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": True, "maximize": False}
    spec = ModelSpec(
        tuple((name, tuple(v.shape), str(v.dtype)) for name, v in zip("abc", values, strict=True)),
        (("mask", (2,), "torch.float32"),),  # not in the state_dict
        OptimizerSpec("AdamW", (options,), ((0, 1, 2),)),
        (("a", 0), ("tied.a", 0), ("b", 1), ("c", 2)),
    )
    store = Store(spec, values, [torch.tensor([0.0, -math.inf])], statistics=True)

    def push(missing=()):
        flat = store.layout.pack([torch.randn(v.shape) for v in values])
        return Gradient(flat, frozenset(missing), [options], [torch.ones(2)])

    store.merge([push({1})], [0.5], [4], stock=False)  # one parameter has no optimizer state yet
    run = msgspec.structs.replace(snapshot(InterruptedRun("bsp", "adamw", "epoch").coordinator, 0.0), version=1)
    writer = Checkpointer(tmp_path, 1)
    writer.begin(run, store.contents(), {}, [])
    found = read(writer.complete())
    back = store_of(found.contents(), found.run.version, statistics=True)
    assert load_file(tmp_path / "v000000001" / MODEL).keys() == {"a", "tied.a", "b", "c"}
    for weights in ([1.0], [0.25], [0.5, 0.25]):
        pushes = [push() for _ in weights]
        outcomes = [s.merge(pushes, weights, [4] * len(weights), stock=False) for s in (store, back)]
        assert outcomes[0] == outcomes[1]
        assert outcomes[0].inner_product is not None
    assert store.version == back.version == 4
    for one, other in ((store.snapshot(), back.snapshot()),):
        for mine, theirs in ((one.parameters, other.parameters), (one.buffers, other.buffers),
                             (one.optimizer_tensors, other.optimizer_tensors)):  # fmt: skip
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert one.optimizer == other.optimizer


# -- what cannot be read -----------------------------------------------------------------------------------------------


def test_folders_without_a_checkpoint_are_refused(tmp_path):
    assert newest(tmp_path) is None
    with pytest.raises(CheckpointError, match="holds no checkpoint.*--checkpoint-every"):
        read(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        read(tmp_path / "nowhere")


def test_a_newer_format_is_refused(tmp_path):
    _, place = saved(tmp_path)
    data = json.loads((place / HEAD).read_text())
    (place / HEAD).write_text(json.dumps({"format": FORMAT + 1, "of": "another shape"}))
    with pytest.raises(CheckpointError, match=f"format {FORMAT + 1}; this version reads up to {FORMAT}"):
        read(place)
    del data["checksum"]  # else the file would count as damaged
    (place / HEAD).write_text(json.dumps({**data, "beyond": 1}))
    assert read(place).run.version == 1


def test_damaged_files_are_named(tmp_path):
    _, place = saved(tmp_path)
    whole = tmp_path / "whole"
    shutil.copytree(place, whole)
    for name in [path.name for path in whole.iterdir()]:
        for damage in ("cut", "flip", "missing"):
            shutil.rmtree(place)
            shutil.copytree(whole, place)
            data = bytearray((place / name).read_bytes())
            if damage == "cut":
                (place / name).write_bytes(data[:-5])
            elif damage == "flip":
                data[len(data) // 2] ^= 16
                (place / name).write_bytes(data)
            else:
                (place / name).unlink()
            with pytest.raises(CheckpointError, match=name):
                read(place)


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tmp_path, caplog):
    """Whatever is wrong with the newer ones; each is named, and so is the one that is taken."""
    folder = tmp_path / "checkpoints"
    _, place = saved(tmp_path)
    one, other, third = (folder / f"v{number:09d}" for number in (1, 2, 3))
    shutil.copytree(place, other)
    shutil.copytree(place, third)
    assert (place, read(tmp_path).path, caplog.messages) == (one, third, [])
    (third / HEAD).unlink()
    (other / "model.safetensors").write_bytes(b"")
    for asked in (tmp_path, folder):
        caplog.clear()
        assert read(asked).path == newest_whole(asked) == one
        assert [str(damaged) in text and text.endswith(f"going on from an older one, {one}")
                for damaged, text in zip((third, other), caplog.messages, strict=False)] == [True, True]  # fmt: skip
    with pytest.raises(CheckpointError, match="v000000003"):
        read(third)  # which was asked for by name
    (one / HEAD).write_text(json.dumps({"format": FORMAT + 1}))
    with pytest.raises(CheckpointError, match="all 3 checkpoints .* damaged; of the newest: cannot open .*v000000003"):
        read(tmp_path)
    assert newest_whole(tmp_path) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_bit_of_a_checkpoint_can_be_turned_unnoticed(tmp_path, seed):
    _, place = saved(tmp_path)
    chance = random.Random(seed)
    file = chance.choice(sorted(path for path in place.iterdir()))
    data = bytearray(file.read_bytes())
    before = json.loads(data) if file.name == HEAD else None
    while True:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        try:
            if before is not None and json.loads(data) == before:
                continue  # white space between its parts
        except ValueError:
            pass
        break
    with pytest.raises(CheckpointError, match=file.name):
        read(place)


def test_another_model_or_optimizer_is_told_apart(tmp_path):
    _, place = saved(tmp_path)
    spec = linear_store("momentum").spec
    found = spec_of_contents(read(place).contents())
    assert found == spec
    other = msgspec.structs.replace(spec, parameters=(("weight", (3, 6), "torch.float32"), spec.parameters[1]))
    told = found.difference(other, "the checkpoint", "the script")
    assert re.match(r"the script has weight \[3, 6\].*where the checkpoint has weight \[3, 5", told)
    told = found.difference(linear_store("adamw").spec, "the checkpoint", "the script")
    assert "the script's optimizer (AdamW) differs from the checkpoint's (SGD" in told


def broken_off(tmp_path: Path, strategy: str = "bsp") -> HandDrivenRun:
    """A run with a checkpoint after its first version."""
    hand = HandDrivenRun(strategy, folder=tmp_path, checkpoint_every=Every.parse("1v")).train()
    for worker in (0, 1):
        hand.pushes(worker)
    for worker in (0, 1):
        hand.says(worker, SavedState(hand.last(worker, Work).save, b"state of its own"))
    return hand


def test_a_run_goes_on_with_what_its_server_and_its_workers_had(tmp_path):
    first = broken_off(tmp_path)
    again = HandDrivenRun(resume=tmp_path).train()
    assert (again.run.coordinator.version, again.model) == (1, first.model)
    assert [again.last(worker, Welcome).state for worker in (0, 1)] == [b"state of its own"] * 2
    for worker in (0, 1):
        again.pushes(worker)
    assert again.run.coordinator.used == 8
    assert again.over_for(0) is not None


def test_a_checkpoint_with_the_older_name_of_the_runs_state_is_read(tmp_path):
    broken_off(tmp_path)
    file = newest(tmp_path) / HEAD
    head = json.loads(file.read_text())
    head["engine"]["conduct"] = head["engine"].pop("run_state")
    del head["checksum"]  # which older ones do not have
    file.write_text(json.dumps(head))
    assert HandDrivenRun(resume=tmp_path).train().run.coordinator.version == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"parameters": (("w", (2,), "torch.float32"),)}, r"the script has w \[2\].* the checkpoint has w \[1\]"),
        ({"optimizer": OptimizerSpec("AdamW", ({},), ((0,),))}, r"the script's optimizer \(AdamW\) differs"),
    ],
)
def test_a_run_is_not_gone_on_with_by_another_script(tmp_path, change, told):
    broken_off(tmp_path)
    again = HandDrivenRun(resume=tmp_path)
    given = msgspec.structs.replace(hello(), spec=msgspec.structs.replace(hello().spec, **change))
    again.prepares(1)
    with pytest.raises(CheckpointError, match=f"v000000001.* is of another model: {told}"):
        again.says(0, given)


def test_a_script_of_tables_does_not_go_on_with_a_model_nor_the_other_way_round(tmp_path):
    broken_off(tmp_path / "model")
    again = HandDrivenRun(resume=tmp_path / "model")
    spec = TableSpec("counts", 4, 1, "float32", None, "add", eager=False)
    with pytest.raises(CheckpointError, match="v000000001.* is of a run that shares something else"):
        again.says(0, OpenTable(spec))

    tables = HandDrivenRun("ssp", folder=tmp_path / "tables", checkpoint_every=Every.parse("1v"))
    for worker in (0, 1):
        tables.says(worker, OpenTable(spec))
    tables.says(0, TableInit(0, np.zeros((4, 1), np.float32)))
    for worker in (0, 1):
        tables.says(worker, Ready(0, 1 << 40, 1, 1, "clocks", 1))
        tables.says(worker, Tick(1, 1, []))
    tables.run.checkpoints.finish()
    again = HandDrivenRun("ssp", resume=tmp_path / "tables")
    with pytest.raises(CheckpointError, match="v.* is of tables, and the script trains a model"):
        again.prepares(0)


def test_a_folder_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    run = InterruptedRun("bsp", "momentum", "epoch")
    with pytest.raises(CheckpointError, match="cannot write a checkpoint to .*drop --checkpoint-every"):
        run.save(tmp_path / "checkpoints")


def test_a_restored_strategy_decides_as_the_one_that_was_saved(tmp_path):
    run, place = saved(tmp_path, 7)
    taken = read(place).run
    assert taken.strategy == "bsp"
    state = strategies.build(taken.strategy, 0).restore(taken.strategy_state).snapshot()
    assert json.loads(json.dumps(state)) == taken.strategy_state
    assert Counter(taken.members) == Counter(range(WORKERS))
    assert isinstance(run.sink[1], Decision)
