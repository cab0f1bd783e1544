"""A group averages among itself: everybody has the mean, and one that goes away does not hold the others up."""

import pytest
import torch

from paceline.peers.group_average import GroupAverage
from paceline.peers.messages import Group
from paceline.transport.mail import Delivered


class Post:
    """Mailboxes that deliver at once, but for those who are gone or full."""

    def __init__(self):
        self.averages, self.gone, self.refused, self.bytes = {}, set(), 0, 0

    def of(self, node):
        return Sender(self, node)


class Sender:
    def __init__(self, post, node):
        self._post, self._node = post, node

    def post(self, peer, header, values):
        if self._post.refused:
            self._post.refused -= 1
            return False
        if peer not in self._post.gone:
            raw = [value.clone().view(torch.uint8) for value in values]
            self._post.averages[peer].take(Delivered(header, raw))
        self._post.bytes += sum(value.nbytes for value in values)
        return True


def group_of(count):
    post = Post()
    for node in range(count):
        post.averages[node] = GroupAverage(node, 0, post.of(node))
    generator = torch.Generator().manual_seed(count)
    models = [
        [torch.randn(3, 5, generator=generator), torch.randn(7, generator=generator).double(), torch.randn(())]
        for _ in range(count)
    ]  # fmt: skip
    return post, models


def advance(post, members):
    for _ in range(4):
        for node in members:
            post.averages[node].advance()


def mean(models):
    return [torch.stack([t.double() for t in tensors]).mean(dim=0).to(tensors[0].dtype)
            for tensors in zip(*models, strict=True)]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
def test_everybody_has_the_mean_and_has_sent_what_a_ring_would(count):
    post, models = group_of(count)
    group = Group(4, 0, list(range(count)))
    for node in reversed(range(count)):  # messages come before the word that the group has formed
        post.averages[node].begin(group, models[node])
        post.averages[node].advance()
    advance(post, range(count))
    expected, nbytes = mean(models), sum(t.nbytes for t in models[0])
    for node in range(count):
        assert post.averages[node].done
        for got, wanted in zip(post.averages[node].result(), expected, strict=True):
            assert torch.equal(got, wanted)
    sent = [post.averages[node].sent_bytes for node in range(count)]
    assert sum(sent) == post.bytes == 2 * (count - 1) * nbytes


def test_a_member_that_goes_away_is_left_out_by_those_who_are_not_done():
    post, models = group_of(4)
    for node in (0, 1, 2):
        post.averages[node].begin(Group(2, 0, [0, 1, 2, 3]), models[node])
    advance(post, (0, 1, 2))
    assert not any(post.averages[node].done for node in (0, 1, 2))
    post.gone.add(3)
    for node in (0, 1, 2):
        post.averages[node].begin(Group(2, 1, [0, 1, 2]), models[node])
    advance(post, (0, 1, 2))
    for node in (0, 1, 2):
        for got, wanted in zip(post.averages[node].result(), mean(models[:3]), strict=True):
            assert torch.equal(got, wanted)
    assert sum(post.averages[node].sent_bytes for node in (0, 1, 2)) == post.bytes  # those of both attempts


def test_messages_of_an_attempt_that_failed_do_not_count():
    post, models = group_of(3)
    for node in (0, 1):
        post.averages[node].begin(Group(1, 0, [0, 1, 2]), models[node])
    post.averages[0].begin(Group(1, 1, [0, 1]), models[0])
    advance(post, (0,))
    assert not post.averages[0].done


def test_what_is_refused_is_sent_again():
    post, models = group_of(2)
    post.refused = 3
    for node in (0, 1):
        post.averages[node].begin(Group(1, 0, [0, 1]), models[node])
    advance(post, (0, 1))
    assert all(post.averages[node].done for node in (0, 1))
