"""A model split over shards is the same model: cut, trained, saved and joined again as if it were in one store."""

import math
import mmap
import os
import threading

import pytest
import torch
from shard_threads import shard_links
from sharded_models import SHAPES, Elsewhere, assert_same, model, parameters, spec_of, values_of, whole

from paceline.core.errors import CheckpointError, InternalError, OptionError, PeerError, UserError
from paceline.core.updates import PushRef
from paceline.model import sharding
from paceline.model.joint_optimizer import make_optimizer
from paceline.model.mass_optimizer import EXACT, SCALED, OptimizerSpec
from paceline.model.regions import Region, RegionLayout, private_region
from paceline.model.sharding import BLOCK, ModelSplit, joined_tensors, require_splittable, shapes_of
from paceline.model.spec import ModelSpec
from paceline.model.store import Gradient, Parameters, Store, Unwritten, store_of
from paceline.shards import commands as c
from paceline.shards import messages
from paceline.shards.sharded_endpoint import ShardedEndpoint
from paceline.shards.sharded_store import ShardedStore, ShardLinks
from paceline.shards.worker_ends import WorkerEnds
from paceline.transport.codec import Codec
from paceline.transport.messages import Hello, Note, Push, Welcome
from paceline.transport.shm import Channel, anonymous_file
from paceline.transport.zeromq import ZeromqHub

ELEMENTWISE = [name for name in (*EXACT, *SCALED) if name not in sharding.OF_TENSORS]


class Worker:
    """A worker's region, shared with the shards."""

    def __init__(self, spec, links):
        layout = RegionLayout(spec)
        descriptor = anonymous_file(layout.nbytes)
        self.region = Region(layout, mmap.mmap(descriptor, layout.nbytes))
        links.share(self.region, spec, descriptor)
        os.close(descriptor)

    def push(self, spec, slot, seed, missing=(), change=()):
        torch.manual_seed(seed)
        filled = self.region.slots[slot]
        for view in filled.views:
            view.copy_(torch.randn(view.shape))
        for place in missing:
            filled.views[place].zero_()
        options = [dict(group) for group in spec.optimizer.groups]
        return Gradient(filled.flat, frozenset(missing), options, change, 0.5, 1.0, slot, filled.views)


def ref(ticket, samples=4):
    return PushRef(0, 0, ticket, samples)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_ranges_cover_every_buffer_once_at_multiples_of_a_block(shards):
    values, spec = model(dtypes=(torch.float32, torch.float64))
    splits = [ModelSplit(spec, shard, shards) for shard in range(shards)]
    for buffer, length in enumerate(spec.layout.lengths):
        ranges = [r for split in splits for r in split.ranges if r.buffer == buffer]
        assert sum(r.end - r.begin for r in ranges) == length
        assert all(r.begin % BLOCK == 0 and (r.end % BLOCK == 0 or r.end == length) for r in ranges)
    flat = spec.layout.pack(values)
    for split in splits:
        own = split.narrow(flat)
        layout = split.spec.layout
        assert layout.lengths == [len(part) for part in own]
        for piece, view in zip(split.pieces, layout.views(own), strict=True):
            assert torch.equal(view.reshape(-1), values[piece.parameter].reshape(-1)[piece.begin : piece.end])
    counts = [
        sum(p.end - p.begin for split in splits for p in split.pieces if p.parameter == i) for i in range(len(values))
    ]
    assert counts == [v.numel() for v in values]


@pytest.mark.parametrize("name", sharding.OF_TENSORS)
def test_an_optimizer_of_whole_tensors_is_cut_between_them(name):
    _, spec = model(name)
    splits = [ModelSplit(spec, shard, 2) for shard in range(2)]
    assert all(piece.whole for split in splits for piece in split.pieces)
    assert sorted(p.parameter for split in splits for p in split.pieces) == list(range(len(spec.parameters)))
    assert all(split.pieces for split in splits)


def test_an_optimizer_of_the_users_own_is_refused():
    _, spec = model()
    own = ModelSpec(spec.parameters, (), OptimizerSpec("mine:Prodigy", ({},), ((0,),)), ())
    with pytest.raises(OptionError, match="class of your own"):
        require_splittable(own)


@pytest.mark.parametrize("name", [*EXACT, *SCALED])
@pytest.mark.parametrize("shards", [2, 3])
def test_training_is_bit_identical_to_one_store(name, shards):
    """Several pushes and one, whole and fractional masses, parameters without gradient."""
    values, spec = model(name, **({"momentum": 0.9, "nesterov": True} if name == "SGD" else {}))
    plain = Store(spec, values, [], False)
    with shard_links(shards) as links, torch.no_grad():
        store = ShardedStore(spec, values, [], False, links)
        workers = [Worker(spec, links) for _ in range(2)]
        for step in range(4):
            missing = [1] if step == 2 else []
            pushes = [w.push(spec, step % 2, 10 * step + i, missing) for i, w in enumerate(workers)]
            if step == 3:
                pushes = pushes[:1]
            weights = [1 / len(pushes)] * len(pushes) if step < 2 else [0.4] * len(pushes)
            for each in (plain, store):
                each.merge(pushes, weights, [4] * len(pushes), stock=False)
            assert_same(parameters(store), parameters(plain))
        assert store.write_to(workers[0].region.flat, workers[0].region.buffers) == 4
        assert_same(workers[0].region.parameters, parameters(plain))
        mine, theirs = store.optimizer.state(), plain.optimizer.state()
        assert mine[0].keys() == theirs[0].keys()
        assert all(torch.equal(mine[0][key], theirs[0][key]) for key in mine[0])
        assert mine[1] == theirs[1]
        assert (store.notice, store.version) == (plain.notice, plain.version)


def test_halves_have_masters_and_buffers_stay_with_the_coordinator():
    buffers = [torch.zeros(3), torch.tensor(1)]
    values, spec = model("AdamW", (torch.bfloat16, torch.float32), buffers)
    plain = Store(spec, values, buffers, False)
    with shard_links(2) as links, torch.no_grad():
        store = ShardedStore(spec, values, buffers, False, links)
        worker = Worker(spec, links)
        for step in range(3):
            change = [torch.full((3,), 0.5), torch.tensor(step + 7)]
            push = worker.push(spec, store.free_slot(worker.region, 0), step, change=change)
            for each in (plain, store):
                each.merge([push], [1.0], [4], stock=False)
        assert store.has_masters
        assert_same(whole(store), whole(plain))
        store.write_to(worker.region.flat, worker.region.buffers)
        assert_same(worker.region.parameters + worker.region.buffers, whole(plain))
        assert worker.region.buffers[1] == 9
        assert_same(store.read().flat, plain.read().flat)


def test_statistics_of_the_parts_are_those_of_the_whole():
    values, spec = model()
    plain = Store(spec, values, [], True)
    with shard_links(3) as links, torch.no_grad():
        store = ShardedStore(spec, values, [], True, links)
        worker = Worker(spec, links)
        for step in range(3):
            push = worker.push(spec, 0, step)
            found, expected = (each.merge([push], [1.0], [4], stock=False) for each in (store, plain))
            assert found.norm == pytest.approx(expected.norm, rel=1e-5)
            if step:
                assert found.inner_product == pytest.approx(expected.inner_product, rel=1e-4, abs=1e-3)
            else:
                assert found.inner_product is None


def test_held_pushes_are_extended_copied_out_and_dropped():
    values, spec = model()
    plain = Store(spec, values, [], False)
    with shard_links(2) as links, torch.no_grad():
        store = ShardedStore(spec, values, [], False, links)
        one, other = Worker(spec, links), Worker(spec, links)
        for each, worker in ((store, one), (plain, other)):
            assert each.free_slot(worker.region, 0) == 0
            each.hold(1, worker.push(spec, 0, 1))
            assert each.free_slot(worker.region, 0) == 1
            each.hold(2, worker.push(spec, 1, 2))
            assert each.free_slot(worker.region, 0) == 0  # the first push was copied out of it
            each.hold(3, worker.push(spec, 0, 3))
            extended = each.extend(ref(1, 4), ref(3, 2))
            assert extended.samples == 6
            each.apply([extended, ref(2)], [0.7, 0.3], stock=False)
        assert_same(parameters(store), parameters(plain))
        for each, worker in ((store, one), (plain, other)):
            for ticket, slot in ((4, 0), (5, 1)):
                each.hold(ticket, worker.push(spec, slot, ticket))
            slot = each.free_slot(worker.region, 0)
            each.discard(ref(4))  # which was copied out
            each.hold(6, worker.push(spec, slot, 6))
            each.apply([ref(5), ref(6)], [0.5, 0.5], stock=False)
        assert_same(parameters(store), parameters(plain))


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Muon", "Adafactor"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2)])
def test_a_checkpoint_is_read_by_any_number_of_shards(tmp_path, name, before, after):
    values, spec = model(name, **({"momentum": 0.9} if name == "SGD" else {}))
    plain = Store(spec, values, [], True)

    def train(store, steps, worker):
        for step in steps:
            store.merge(
                [worker.push(spec, store.free_slot(worker.region, 0), step)],
                [0.5 if step % 2 else 1.0],
                [4],
                stock=False,
            )

    with shard_links(before) as first, shard_links(after) as second, torch.no_grad():

        def make(links, count):
            return lambda *given: Store(*given) if count == 1 else ShardedStore(*given, links)

        store = make(first, before)(spec, values, [], True)
        train(store, range(3), Worker(spec, first))
        again = store_of(Elsewhere(store, tmp_path).contents, 3, True, make(second, after))
        train(again, range(3, 5), Worker(spec, second))
        train(plain, range(5), Worker(spec, first))
        assert again.version == 5
        assert_same(parameters(again), parameters(plain))
        last = (
            each.merge([Worker(spec, links).push(spec, 0, 9)], [1.0], [4], stock=False)
            for each, links in ((again, second), (plain, first))
        )
        found, expected = last
        assert found.inner_product == pytest.approx(expected.inner_product, rel=1e-4, abs=1e-3)


def test_state_that_a_script_loads_reaches_every_shard():
    values, spec = model("AdamW")
    with shard_links(2) as links, torch.no_grad():
        plain, store = Store(spec, values, [], False), ShardedStore(spec, values, [], False, links)
        worker = Worker(spec, links)
        plain.merge([worker.push(spec, 0, 1)], [0.5], [4], stock=False)
        tensors, numbers = plain.optimizer.state()
        store.optimizer.load({key: t.clone() for key, t in tensors.items()}, numbers)
        store.overwrite(*plain.state())
        for each in (plain, store):
            each.optimizer.scale_rate(3.0)
            each.merge([worker.push(spec, 0, 2)], [1.0], [4], stock=False)
        assert_same(parameters(store), parameters(plain))


def test_several_optimizers_step_together():
    values = values_of(SHAPES)
    leaves = [torch.nn.Parameter(v) for v in values]
    matrices = [leaf for leaf in leaves if leaf.dim() == 2 and leaf.numel()]
    rest = [leaf for leaf in leaves if leaf.dim() != 2 or not leaf.numel()]
    spec = spec_of(leaves, [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)])
    plain = Store(spec, values, [], False)
    with shard_links(2) as links, torch.no_grad():
        store = ShardedStore(spec, values, [], False, links)
        worker = Worker(spec, links)
        for step in range(3):
            push = worker.push(spec, store.free_slot(worker.region, 0), step)
            for each in (plain, store):
                each.merge([push], [0.5], [4], stock=False)
        assert_same(parameters(store), parameters(plain))
        assert store.optimizer.state()[0].keys() == plain.optimizer.state()[0].keys()


def test_a_shards_fault_is_the_runs():
    values, spec = model()
    with shard_links(2) as links, torch.no_grad():
        store = ShardedStore(spec, values, [], False, links)
        worker = Worker(spec, links)
        push = worker.push(spec, 0, 1)
        push.options = push.options[:1]
        store.merge([push], [1.0], [4], stock=False)
        with pytest.raises(Exception, match="parameter groups"):
            store.read()
        with pytest.raises(InternalError, match="no region"):
            store.write_to([torch.zeros(1)], [])


def test_saved_parts_that_are_not_all_of_a_tensor_are_refused():
    _, spec = model()
    parts = {"2.exp_avg[0:1024]": torch.zeros(1024), "2.exp_avg[2048:3690]": torch.zeros(1642)}
    with pytest.raises(CheckpointError, match="not all of it"):
        joined_tensors(parts, shapes_of(spec))


def test_a_region_that_nobody_uses_is_dropped():
    values, spec = model()
    with shard_links(2) as links, torch.no_grad():
        store = ShardedStore(spec, values, [], False, links)
        worker = Worker(spec, links)
        store.write_to(worker.region.flat, worker.region.buffers)
        del worker
        assert links._dropped
        store.read()
        assert not links._dropped


def test_a_model_smaller_than_a_block_is_one_shards_alone():
    values = [torch.randn(7)]
    leaf = torch.nn.Parameter(values[0])
    spec = spec_of([leaf], [torch.optim.SGD([leaf], lr=1.0)])
    assert not ModelSplit(spec, 1, 2).pieces or not ModelSplit(spec, 0, 2).pieces
    plain = Store(spec, values, [], True)
    with shard_links(2) as links, torch.no_grad():
        store = ShardedStore(spec, values, [], True, links)
        worker = Worker(spec, links)
        push = worker.push(spec, 0, 1)
        found, expected = (each.merge([push], [1.0], [4], stock=False) for each in (store, plain))
        assert math.isclose(found.norm, expected.norm, rel_tol=1e-6)
        assert_same(parameters(store), parameters(plain))
        assert make_optimizer(spec.optimizer, values).notice is None


# -- workers that share no memory --------------------------------------------------------------------------------------


def test_what_a_shard_sends_together_with_an_answer_is_taken_in():
    mine, theirs = Channel.pair()
    theirs.send(c.encode(c.Listens("")))
    links = ShardLinks([mine], lambda shard: pytest.fail(f"shard {shard} is gone"))
    links._tokens[4] = "hers"
    for message in (c.CommandDone(), c.Held(4, 9, 1.0), c.Held(5, 9, 1.0), c.Broken("t", "nonsense")):
        theirs.send(c.encode(message))
    links.ask(c.Reach(), c.CommandDone)
    assert links.news
    assert links._held == {4: {9: {0: 1.0}}}
    assert [each.text for each in links.broken] == ["nonsense"]
    theirs.send(c.encode(c.Fault("user", "no such thing", "")))
    with pytest.raises(UserError, match="no such thing"):
        links.listen()
    theirs.send(c.encode(c.CommandDone()))
    with pytest.raises(InternalError, match="unasked"):
        links.listen()
    links.close()
    theirs.close()


def test_a_push_has_come_when_every_shard_holds_it():
    pairs = [Channel.pair() for _ in range(2)]
    for _, theirs in pairs:
        theirs.send(c.encode(c.Listens("")))
    links = ShardLinks([mine for mine, _ in pairs], lambda shard: pytest.fail(f"shard {shard} is gone"))
    pairs[0][1].send(c.encode(c.Held(1, 5, 3.0)))
    pairs[0][1].send(c.encode(c.Held(1, 6, 3.0)))
    region = private_region(model()[1])
    assert links._number(region) == 1
    links._tokens[1] = "hers"
    links.listen()
    assert links.take(region, 6) is None
    pairs[0][1].send(c.encode(c.Held(1, 6, 3.0)))  # the worker has sent that part twice
    links.listen()
    assert not links.news
    assert links.take(region, 6) is None
    pairs[1][1].send(c.encode(c.Held(1, 6, 4.0)))
    links.listen()
    assert links.take(region, 5) is None
    assert links.take(region, 6) == 5.0
    assert links.take(region, 6) is None
    for ticket in range(100, 170):
        pairs[0][1].send(c.encode(c.Held(1, ticket, 1.0)))
    links.listen()
    assert "parts of 65 pushes at once" in links.broken[0].text
    links.close()
    for _, theirs in pairs:
        theirs.close()


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_push_in_parts_is_taken_where_it_is_expected_alone(in_parts):
    _, spec = model()
    worker, server = Codec(), Codec(private_region)
    worker.region = private_region(spec)
    server.at_server(bytearray(worker.encode(Hello(spec, [], []))[0]))
    server.in_parts = in_parts
    slot = worker.region.slots[1]
    gradient = Gradient(slot.flat, frozenset({1}), [], [], 0.5, 1.0, 1, slot.views)
    gradient.in_parts = True
    data, _ = worker.encode(Push(3, 4, gradient))
    assert not [tensor for holder in worker.shared for tensor in holder.all()]
    if not in_parts:
        with pytest.raises(PeerError, match="slot must be 0 to 1, not 3"):
            server.at_server(bytearray(data))
        return
    found = server.at_server(bytearray(data))[0].gradient
    assert (found.in_parts, found.slot, found.missing) == (True, 1, frozenset({1}))
    gradient.in_parts = False
    with pytest.raises(PeerError, match="slot must be 2 to 3, not 1"):
        server.at_server(bytearray(worker.encode(Push(3, 4, gradient))[0]))


def test_a_version_in_parts_names_their_number_and_brings_buffers_alone():
    _, spec = model(buffers=[torch.zeros(3)])
    worker, server = Codec(), Codec(private_region)
    worker.region = private_region(spec)
    server.at_server(bytearray(worker.encode(Hello(spec, [], []))[0]))
    data, _ = server.encode(Welcome(Parameters(7, server.region.flat, server.region.buffers, parts=40)))
    assert [tensor for holder in server.shared for tensor in holder.all()] == server.region.buffers
    with pytest.raises(PeerError, match="in the server's memory"):
        worker.at_worker(bytearray(data))
    worker.in_parts = True
    found = worker.at_worker(bytearray(data))[0].parameters
    assert (found.version, found.parts, found.flat is worker.region.flat) == (7, 40, True)


class FarWorker(threading.Thread):
    """A worker over ZeroMQ: it pushes, reads a version, and sends a shard what is no part of a push."""

    def __init__(self, addresses, spec):
        super().__init__()
        self.addresses, self.spec = addresses, spec
        self.read = None

    def run(self):
        endpoint = ShardedEndpoint(self.addresses, "t")
        region = endpoint.adopt(self.spec)
        endpoint.send(Hello(self.spec, region.parameters, region.buffers))
        endpoint.receive()
        slot = region.slots[1]
        late = Unwritten((flat, torch.arange(len(flat)).float()) for flat in slot.flat)
        endpoint.send(Push(3, 4, Gradient(slot.flat, frozenset(), [], [], None, None, 1, slot.views, late)))
        version = endpoint.receive().parameters
        self.read = [version.version, *(flat.clone() for flat in version.flat)]
        endpoint._shards[0].send(Note("loss", 1.0))
        endpoint.close()


def collected(remotes, hub, end):
    """The next message to the coordinator, and what shards had to tell meanwhile."""
    told = []
    while (message := end.collect()) is None:
        hub.pump()
        for remote in remotes:
            told.extend(remote.pump())
    return message, told


def test_a_far_worker_sends_each_shard_its_part_and_reads_one_version_from_all(tmp_path):
    values, spec = model()
    splits = [ModelSplit(spec, shard, 2) for shard in range(2)]
    hub, *hubs = [ZeromqHub(f"ipc://{tmp_path / name}") for name in ("hub", "one", "two")]
    remotes, mirrored = [WorkerEnds(each, None) for each in hubs], []
    end = hub.expect("t")
    end.leave_to_shards(
        lambda region, spec: mirrored.extend(r.mirror(1, s, "t") for r, s in zip(remotes, splits, strict=True))
    )
    for remote in remotes:
        remote.expect("t")
    worker = FarWorker(messages.BETWEEN.join([hub.address, *(remote.address for remote in remotes)]), spec)
    worker.start()
    with torch.no_grad():
        hello, told = collected(remotes, hub, end)
        assert isinstance(hello, Hello)
        end.deliver(Welcome(None))
        push, more = collected(remotes, hub, end)
        told += more
        assert (push.ticket, push.gradient.slot, push.gradient.in_parts) == (3, 1, True)
        while len(told) < len(remotes):
            told += [note for remote in remotes for note in remote.pump()]
        assert [(note.region, note.ticket) for note in told] == [(1, 3)] * 2
        whole = math.sqrt(sum(float((torch.arange(n).double() ** 2).sum()) for n in spec.layout.lengths))
        assert math.hypot(*(note.norm for note in told)) == pytest.approx(whole, rel=1e-6)
        for split, mirror in zip(splits, mirrored, strict=True):
            expected = split.narrow([torch.arange(length).float() for length in spec.layout.lengths])
            assert_same(mirror.slots[1].flat, expected)
        stores = [Store(s.spec, [v.clone() for v in s.spec.layout.views(s.narrow(spec.layout.pack(values)))], [], False)
                  for s in splits]  # fmt: skip
        for remote, store in zip(remotes, stores, strict=True):
            remote.send_version(1, 7, store)  # whose message never comes: it is skipped
            remote.send_version(1, 8, store)
        end.deliver(Welcome(Parameters(5, end.region.flat, end.region.buffers, parts=8)))
        while not (notes := list(remotes[0].pump())):
            hub.pump()
        assert "takes parts of pushes and clocks, not a Note" in notes[0].text
    worker.join()
    assert worker.read[0] == 5
    assert_same(worker.read[1:], spec.layout.pack(values))
    for each in (*remotes, hub):
        each.close()
