"""Where a stream stands: read, shown, saved and restored."""

import pytest
from torch.utils.data import DataLoader, IterableDataset

from paceline.core.errors import OptionError
from paceline.core.ledger import ENDLESS, make_ledger
from paceline.worker.streaming import is_stream, open_stream


class Numbers(IterableDataset):
    """0, 1, ... 9, from a position of its own."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 10:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Plain(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Loader(DataLoader):
    """A loader that knows its position."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.skip = self.given = 0

    def __iter__(self):
        skip, self.skip = self.skip, 0
        self.given = 0
        for number, batch in enumerate(super().__iter__()):
            self.given = number + 1
            if number >= skip:
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.skip = self.given = state["given"]


class Reader:
    """An iterator with a position."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return [2 * self.at - 2, 2 * self.at - 1]

    state_dict = Numbers.state_dict
    load_state_dict = Numbers.load_state_dict


def opened(data, batch_size=None, **options):
    fetcher, _ = open_stream(data, batch_size, None, 1, 1, options, [])
    return fetcher


def read(fetcher, count):
    return [[int(number) for number in batch] for batch in fetcher.batches([None] * count)]


STATEFUL = {
    "data set": lambda: opened(Numbers(), 2),
    "loader": lambda: opened(Loader(Plain(), batch_size=2)),
    "data set in a loader": lambda: opened(DataLoader(Numbers(), batch_size=2)),
    "iterator": lambda: opened(Reader()),
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_stream_with_a_state_goes_on_where_it_stood(kind):
    one = STATEFUL[kind]()
    assert one.keeps_state
    assert read(one, 2) == [[0, 1], [2, 3]]
    other = STATEFUL[kind]()
    other.load_state_dict(one.state_dict())
    assert read(other, 9) == [[4, 5], [6, 7], [8, 9]] == read(one, 9)
    assert one.ended
    assert other.ended
    after = STATEFUL[kind]()
    after.load_state_dict(one.state_dict())  # of a stream that has ended: it does not begin again
    assert read(after, 1) == []


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_batch_that_is_shown_is_read_again(kind):
    stream = STATEFUL[kind]()
    for _ in range(2):
        assert [[int(n) for n in batch] for batch in stream.shown(2)] == [[0, 1]]
    (left_early := stream.shown(2)).__next__()
    left_early.close()
    assert read(stream, 2) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("make", [Plain, lambda: ([n, n + 1] for n in range(0, 10, 2))])
def test_a_stream_without_a_state_is_read_from_where_it_is(make):
    one, other = opened(make(), 2), opened(make(), 2)
    assert not one.keeps_state
    assert [[int(n) for n in batch] for batch in one.shown(2)] == [[0, 1]]
    assert read(one, 2) == [[0, 1], [2, 3]]
    other.load_state_dict(one.state_dict())
    assert read(other, 1) == [[0, 1]]
    read(one, 9)
    other.load_state_dict(one.state_dict())
    assert read(other, 1) == []


def test_what_the_script_keeps_is_left_to_it():
    stream = opened(Numbers(), 2)
    stream.kept_by_script = True
    read(stream, 2)
    assert stream.state_dict() == {"ended": False, "position": None}


def test_positions_in_loader_processes_are_not_taken_for_known():
    assert not opened(Numbers(), 2, num_workers=1).keeps_state


def test_a_loader_with_a_state_is_not_rebuilt():
    with pytest.raises(OptionError, match=r"Loader has a state of its own.*give batch_size to it"):
        opened(Loader(Plain(), batch_size=2), 5)
    assert opened(Loader(Plain(), batch_size=2), 2).keeps_state


def test_what_is_a_stream():
    assert [is_stream(data) for data in (Plain(), DataLoader(Plain()), iter([1]), {1, 2}, (n for n in []))] == [
        True
    ] * 5
    assert [is_stream(data) for data in ([1, 2], range(3), DataLoader([1, 2]), "text")] == [False] * 4
    with pytest.raises(OptionError, match="not function: call it"):
        is_stream(_generated)


def _generated():
    yield 1


def test_the_ledger_gives_out_whole_batches():
    ledger = make_ledger("stream", 20, 1, 0, 2, batch=4)
    taken = [ledger.allot(0, work) for work in (1, 4, 7)]
    assert [allotment.samples for allotment in taken] == [4, 4, 8]
    ledger.give_back(0, taken[2])
    assert ledger.allot(1, 400).samples == 12
    assert ledger.allot(1, 4) is None
    assert not ledger.has_unallotted
    ledger.settle(12)
    again = make_ledger("stream", 20, 1, 0, 2, batch=4)
    again.restore(ledger.snapshot([]))
    assert again.allot(0, 400).samples == 8
    assert make_ledger("stream", ENDLESS, 1, 0, 2, batch=4).allot(0, 8).samples == 8
