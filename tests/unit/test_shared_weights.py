"""Parameters that workers on devices read from the server's own memory: the same models, and never a torn version."""

import threading
import time
from pathlib import Path

import pytest
import torch
from clusters import cluster, event, network
from hand_driven import HandDrivenRun
from local_jobs import Job
from one_worker import StandInCopies, assert_same, sgd

import paceline
from paceline.core.ledger import Allotment
from paceline.core.settings import RunConfig
from paceline.engines.local import shared_weights as lending
from paceline.engines.local.control import Setup
from paceline.engines.local.server import LocalEngine
from paceline.engines.local.server_links import Member
from paceline.engines.local.shared_weights import SharedWeights
from paceline.model.store import Gradient, Parameters, Store
from paceline.records.journal import Header
from paceline.server.plan import Plan
from paceline.transport.messages import Hello, Welcome, Work
from paceline.transport.shm import Channel, ShmEndpoint, ShmServerEnd
from paceline.worker.device_replica import DeviceStage
from paceline.worker.replica import spec_of


def made_store(make_optimizer=sgd, dtype=torch.float64):
    model = network(dtype=dtype)
    spec = spec_of(model, make_optimizer(model))
    return Store(spec, [p.detach() for p in model.parameters()], [], statistics=False)


def push_of(store, number):
    flat = [torch.full_like(part, 0.1 * number, dtype=dtype) for part, dtype in
            zip(store.layout.zeros(), store.layout.dtypes, strict=True)]  # fmt: skip
    return Gradient(flat, frozenset(), [dict(group) for group in store.spec.optimizer.groups])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def rmsprop(model):
    return torch.optim.RMSprop(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [sgd, adamw, rmsprop])
def test_a_store_that_moves_comes_to_the_same(make):
    moving, staying = made_store(make), made_store(make)
    for number in range(6):
        if number == 2:
            moving.move_to([torch.zeros_like(flat) for flat in moving.layout.zeros()])
        if number == 4:
            moving.move_home()
        for store in (moving, staying):
            store.merge([push_of(store, number)], [1.0], [4], stock=False)
    for mine, other in zip(moving.state()[0], staying.state()[0], strict=True):
        assert torch.equal(mine, other)


class Borrower:
    """A worker's end and the server's, with a store between them."""

    def __init__(self, store, lending):
        ours, theirs = Channel.pair()
        self.worker = ShmEndpoint(ours)
        link = ShmServerEnd(theirs)
        self.member = Member(0, 0, 1, link, evaluator=False)
        self.region = self.worker.adopt(store.spec)
        self.worker.send(Hello(store.spec, self.region.parameters, self.region.buffers, reads=True))
        self.hello = link.collect()
        lending.offer(self.member, store)
        link.deliver(Welcome(Parameters(0, link.region.flat, link.region.buffers)))
        self.worker.receive()

    def grant(self, lending):
        """What the worker would take up next."""
        parameters = lending.version_for(self.member)
        if parameters is None:
            return None
        self.member.link.deliver(Work(1, Allotment(0, 1, None), parameters, 0.0))
        return self.worker.receive().parameters

    def close(self):
        self.worker.close()
        self.member.link.close()


@pytest.fixture
def lent(monkeypatch):
    monkeypatch.setattr(lending, "PATIENCE_S", 0.2)
    remarks = []
    one, store = SharedWeights(remarks.append), made_store()
    borrower = Borrower(store, one)
    yield one, store, borrower, remarks
    borrower.close()
    one.close()


def test_a_version_is_read_where_the_store_has_it(lent):
    lending, store, borrower, _ = lent
    assert borrower.hello.reads
    store.merge([push_of(store, 1)], [1.0], [4], stock=False)
    read = borrower.grant(lending)
    assert read.version == 1
    assert all(torch.equal(a, b) for a, b in zip(read.flat, store._flat, strict=True))
    assert borrower.region.lent
    store._flat[0].fill_(7.0)  # the same memory
    assert bool((read.flat[0] == 7.0).all())


def test_the_store_is_not_written_to_while_somebody_reads(lent):
    lending, store, borrower, remarks = lent
    read = borrower.grant(lending)
    before = [flat.clone() for flat in read.flat]
    seen = []

    def finish():
        time.sleep(0.05)
        seen.append(all(torch.equal(a, b) for a, b in zip(read.flat, before, strict=True)))
        borrower.region.lent = False

    reader = threading.Thread(target=finish)
    reader.start()
    store.merge([push_of(store, 1)], [1.0], [4], stock=False)
    reader.join()
    assert seen == [True]
    assert not all(torch.equal(a, b) for a, b in zip(read.flat, before, strict=True))
    assert not remarks
    assert borrower.grant(lending) is not None


def test_who_does_not_read_in_time_keeps_a_whole_version_and_holds_nobody_up(lent):
    lending, store, borrower, remarks = lent
    read = borrower.grant(lending)
    before = [flat.clone() for flat in read.flat]
    for number in range(2):
        store.merge([push_of(store, number + 1)], [1.0], [4], stock=False)
    assert all(torch.equal(a, b) for a, b in zip(read.flat, before, strict=True))
    assert not torch.equal(store._flat[0], before[0])
    assert len(remarks) == 1
    assert "worker 0 did not read a version in time" in remarks[0]
    assert borrower.grant(lending) is None


def test_who_is_gone_is_not_waited_for(lent):
    lending, store, borrower, remarks = lent
    borrower.grant(lending)
    borrower.member.hung_up = True
    store.merge([push_of(store, 1)], [1.0], [4], stock=False)
    assert not remarks


@pytest.fixture
def engine(lent):
    weights, _, borrower, _ = lent
    header = Header(engine="local", strategy="bsp", seed=0, workers=1)
    plan = Plan(config=RunConfig(), scenario=None, header=header, folder=None, journal=None)
    ours, theirs = Channel.pair()
    engine = LocalEngine(ours, Setup(plan=plan, relay=False, folder=""), Path(), on_idle=lambda: None)
    engine._members[0], engine._weights = borrower.member, weights
    yield engine
    engine._links.close()
    ours.close()
    theirs.close()


def test_who_waits_for_its_grant_reads_the_stores_own_memory(lent, engine):
    _, store, borrower, _ = lent
    given = engine.publish(0, store, waits=True)
    assert [part.data_ptr() for part in given.flat] == [part.data_ptr() for part in store._flat]
    assert borrower.region.lent


def test_who_may_look_late_gets_a_copy(lent, engine):
    _, store, borrower, _ = lent
    given = engine.publish(0, store, waits=False)  # its grant was cancelled, and it does not know
    assert given.flat == borrower.member.link.region.flat
    assert not borrower.region.lent
    assert all(map(torch.equal, given.flat, store._flat))
    before = [part.clone() for part in given.flat]
    store.merge([push_of(store, 1)], [1.0], [4], stock=False)
    assert all(map(torch.equal, given.flat, before))


def test_only_who_has_pushed_since_its_last_grant_is_taken_to_wait():
    hand = HandDrivenRun("fastest_k:k=1").train()
    hand.pushes(0)  # the other one's grant is cancelled, and it may not have looked
    assert hand.engine.recalled == [(1, 2)]
    assert hand.engine.published == [(0, False), (1, False), (0, True), (1, True), (0, True), (1, False)]
    hand.pushes(1, ticket=2)  # it has not: this crossed the cancellation
    hand.pushes(0)
    assert hand.engine.published[6:] == [(0, True), (1, True)]


def test_masters_are_not_lent():
    one, store = SharedWeights(print), made_store(dtype=torch.bfloat16)
    borrower = Borrower(store, one)
    assert borrower.grant(one) is None
    borrower.close()


class DeviceJob(Job):
    """Workers whose device is this machine."""

    late = False

    def __call__(self):
        import paceline.session

        def stage_on(device, region):
            copies = StandInCopies(late=self.late)
            stage = DeviceStage(region, device, copies)
            finish, fetched = copies.finish_uploads, []

            def finish_uploads():
                fetched.append(region.lent)
                if self.late and sum(fetched) == 3:
                    time.sleep(4.0)
                finish()

            copies.finish_uploads = finish_uploads
            self.fetched = fetched
            return stage

        paceline.worker.device_replica.stage_on = stage_on
        super().__call__()
        print(f"{sum(self.fetched)} versions were read", flush=True)


def trained(job, tmp_path, strategy, capfd):
    run = paceline.launch(
        job, engine="local", workers=2, threads=1, seed=3, strategy=strategy, journal=tmp_path / "journal.jsonl"
    )
    return run, [line for line in capfd.readouterr().out.splitlines() if "versions were read" in line]


@pytest.mark.soak
@pytest.mark.slow
def test_real_processes_come_to_the_same_model(tmp_path, capfd):
    plain, _ = trained(Job(tmp_path), tmp_path, "bsp", capfd)
    staged, lines = trained(DeviceJob(tmp_path), tmp_path, "bsp", capfd)
    assert_same(dict(staged.model_state), dict(plain.model_state), rtol=0, atol=0)
    workers = [line for line in lines if "worker" in line]
    assert len(workers) == 2
    assert not any("] 0 versions" in line for line in workers)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["asp", pytest.param("fastest_k:k=1", marks=pytest.mark.soak)])
def test_a_worker_that_stands_still_while_it_reads_holds_nobody_up_for_long(tmp_path, capfd, strategy):
    job = DeviceJob(tmp_path, epochs=3.0)
    job.late = True
    run, _ = trained(job, tmp_path, strategy, capfd)
    assert run.summary.samples_used + run.summary.samples_discarded >= 150
    assert any("did not read a version in time" in text for text in run.summary.warnings)


@pytest.mark.soak
def test_a_server_that_comes_back_lends_its_own_memory(tmp_path, capfd):
    job = DeviceJob(tmp_path, size=60, epochs=3.0)
    run = paceline.launch(
        job, engine="local", threads=1, strategy="bsp", runs_dir=tmp_path / "runs", checkpoint_every="4v",
        scenario=cluster(1.0, 0.5, events=event("server_crash", 0.3)),
    )  # fmt: skip
    assert run.ended == "done"
    assert run.summary.samples_used == 180
    lines = [line for line in capfd.readouterr().out.splitlines() if "versions were read" in line]
    assert len([line for line in lines if "worker" in line and "] 0 versions" not in line]) == 2
