"""Join tokens: only ours are read, every member derives the same keys, and nothing but `reveal` shows the secret."""

import copy
import hashlib
import hmac
import io
import logging
import pickle
import string
import traceback

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from paceline.core.errors import OptionError
from paceline.transport.join_token import PREFIX, ROLES, JoinToken, new_token, read_token
from paceline.transport.security import Security

FIXED = JoinToken(bytes(range(8)), bytes(range(100, 132)))
LINE = "paceline1-AAECAwQFBgdkZWZnaGlqa2xtbm9wcXJzdHV2d3h5ent8fX5_gIGCg7rKXkC7"
VECTORS = {
    "server": (
        b"Nzt=k2u}mzw[/9]T3ObasJP[tz$!5Qt8#M8i&EM!",
        b"8eb793ff80be58cf80ccc824e7b5ecf048a9ba26672f4cc62e1a61494f7e52fc",
    ),
    "worker": (
        b"n=!#<Rz/ZBI!BZIHN)0=vRe*iv6Fed}9z$H[u.we",
        b"4acf2a106db5477fdfdced51a75489ff859436bb56aa97e865659b2206a81455",
    ),
    "node": (
        b"bG!mch$/NHp[9}]0.6BL-H%$1!T+{f:#uSvq.}CS",
        b"ba76ed5f7d302cb9f2ff68956d02d7f18cb0103cda5509d27fe51dadbd8f9404",
    ),
    "shard": (
        b"q*Q&tv/bQy&j2]iFt?@CJ8UP-J-oVbz*w51QM<pe",
        b"42839f33c3134fca50e961a3be5d495712b6d34b09d01e72e36c5d3f5b6bf65c",
    ),
}


def test_a_fixed_token_has_fixed_keys():
    assert FIXED.reveal() == LINE
    assert read_token(LINE) == FIXED
    assert {role: (FIXED.keys(role).public, FIXED.password(role)) for role in ROLES} == VECTORS


def test_keys_are_those_that_the_label_says():
    for role in ROLES:
        label = f"paceline 1 curve25519 run 0001020304050607 role {role}".encode()
        secret = hmac.new(bytes(range(100, 132)), label, hashlib.sha256).digest()
        assert z85.decode(FIXED.keys(role).secret) == secret
        assert FIXED.keys(role).public == zmq.curve_public(z85.encode(secret))


def test_run_role_and_purpose_have_keys_of_their_own():
    other_run = JoinToken(bytes(8), bytes(range(100, 132)))
    other_secret = JoinToken(bytes(range(8)), bytes(32))
    found = [token.keys(role).public for token in (FIXED, other_run, other_secret) for role in ROLES]
    found += [token.password(role) for token in (FIXED, other_run, other_secret) for role in ROLES]
    assert len(set(found)) == len(found) == 24
    with pytest.raises(OptionError, match="role must be one of server, worker, node, shard, not 'guest'"):
        FIXED.keys("guest")


def test_every_new_token_is_another_one_and_can_be_read():
    tokens = [new_token() for _ in range(50)]
    assert len({token.reveal() for token in tokens}) == len({token.run_id for token in tokens}) == 50
    for token in tokens:
        assert read_token(f"  {token.reveal()}\r\n") == token
        assert len(token.reveal()) == 70
        assert set(token.reveal()) <= set(string.ascii_letters + string.digits + "-_")
    assert new_token() != FIXED
    assert LINE != FIXED


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        (LINE.removeprefix(PREFIX), "does not begin with paceline1-"),
        (LINE.replace("paceline1", "paceline2"), "does not begin with paceline1-"),
        (LINE.upper(), "does not begin"),
        (LINE[:-1], "must have 60 characters after paceline1-, not 59"),
        (LINE + "A", "not 61"),
        (f"{LINE} {LINE}", "not 131"),
        (LINE[:-4] + "====", "characters other than letters, digits, - and _"),
        (LINE[:-1] + "+", "characters other than"),
        (LINE[:-1] + "é", "characters other than"),
        (LINE[:20] + "\n" + LINE[21:], "characters other than"),
        (LINE[:20] + ("A" if LINE[20] != "A" else "B") + LINE[21:], "checksum is wrong"),
        (PREFIX + "A" * 60, "checksum is wrong"),
    ],
)
def test_what_is_no_token_is_refused_and_not_repeated(line, match):
    with pytest.raises(OptionError, match=match) as caught:
        read_token(line)
    said = "".join(traceback.format_exception_only(caught.value)) + repr(caught.value.__context__)
    body = line[len(PREFIX) :]
    assert not any(body[at : at + 6] in said for at in range(len(body) - 6) if "paceline" not in body[at - 5 : at + 15])


@given(st.integers(0, 59), st.sampled_from(string.ascii_letters + string.digits + "-_"))
def test_one_changed_character_is_noticed_wherever_it_is(place, character):
    at = len(PREFIX) + place
    changed = LINE[:at] + character + LINE[at + 1 :]
    if changed != LINE:
        with pytest.raises(OptionError, match="checksum"):
            read_token(changed)


def test_nothing_but_reveal_shows_a_secret(caplog):
    security, keys = Security(FIXED), FIXED.keys("server")
    stream = io.StringIO()
    for thing in (FIXED, security, keys):
        print(thing, repr(thing), [thing], f"{thing!s:>90}", file=stream)
        with caplog.at_level(logging.DEBUG):
            logging.getLogger("paceline").error("%s %r", thing, thing)
        for encode in (pickle.dumps, copy.copy, copy.deepcopy, msgspec.json.encode, msgspec.msgpack.encode,
                       msgspec.to_builtins, vars):  # fmt: skip
            try:
                print(encode(thing), file=stream)
            except TypeError as error:
                print(error, file=stream)
    shown = stream.getvalue() + caplog.text
    assert "JoinToken(run 0001020304050607)" in shown
    secrets = [LINE, keys.secret.decode(), bytes(range(100, 132)).hex(), repr(bytes(range(100, 132)))[2:-1]]
    assert not any(secret in shown for secret in secrets)
