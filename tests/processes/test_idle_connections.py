"""Strangers who connect and say nothing: members still get in, and the process can open its files."""

import json
import socket
import subprocess
import sys
import time

import pytest

from paceline.model import descriptors
from paceline.transport.join_token import new_token
from paceline.transport.messages import Cancelled, More
from paceline.transport.security import Security
from paceline.transport.zeromq import ZeromqEndpoint

LIMIT = 256
STRANGERS = 1_500

LISTENER = f"""
import json, logging, resource, sys, time
from pathlib import Path

resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT // 2}, {LIMIT}))
from paceline.records import private_files
from paceline.transport import address_filter
from paceline.transport.join_token import read_token
from paceline.transport.messages import Cancelled
from paceline.transport.base import Lost
from paceline.transport.security import Security
from paceline.transport.zeromq import ZeromqHub

address_filter.FIRST_S, address_filter.LONGEST_S = 0.5, 1.0  # in earnest 2 and 8
hub = ZeromqHub("tcp://127.0.0.1:*", Security(read_token(sys.stdin.readline()), encrypted=sys.argv[2] == "True"))
print(hub.address, flush=True)
end, opened, accepting_failed = hub.expect("member"), 0, 0
over = False
while not over:
    try:
        for each in hub.pump():
            while (message := each.collect()) is not None:
                each.deliver(Cancelled(message.ticket))
    except Lost:
        over = True
    with private_files.open_file(Path(sys.argv[1]), "wb"):
        opened += 1
    try:
        open("/dev/null").close()
    except OSError:
        accepting_failed += 1
    time.sleep(0.0005)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
hub.close()
print(json.dumps([opened, accepting_failed, limits]), flush=True)
"""


@pytest.mark.parametrize("encrypted", [True, False])
def test_members_get_in_and_files_are_opened_beside_idle_connections(tmp_path, encrypted, warm):
    """The member has the address of the strangers, which is not heard for a while."""
    token = new_token()
    listener = warm(
        [sys.executable, "-c", LISTENER, tmp_path / "file", str(encrypted)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    listener.stdin.write(token.reveal() + "\n")
    listener.stdin.flush()
    address = listener.stdout.readline().strip()
    strangers = []
    for number in range(STRANGERS):
        if number == STRANGERS // 2:
            worker = ZeromqEndpoint(address, "member", security=Security(token, encrypted=encrypted))
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", int(address.rpartition(":")[2])))
        strangers.append(stranger)
    for number in range(20):
        worker.send(More(number))
        assert worker.receive() == Cancelled(number)
        time.sleep(0.05)
    worker.close()
    out, log = listener.communicate(timeout=60)
    for stranger in strangers:
        stranger.close()
    assert listener.returncode == 0
    opened, _, limits = json.loads(out)
    assert opened > 50
    assert limits == [LIMIT - LIMIT // 8, LIMIT]
    assert len(log) < 10_000
    assert "did not finish the handshake" in log


def test_a_file_is_opened_when_there_is_no_other_descriptor_left(tmp_path):
    """The test's own process has used up what is shared; without the kept ones the file could not be opened."""
    code = f"""
import errno, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {LIMIT}))
from paceline.model import descriptors
assert descriptors.raise_limit() == {LIMIT} - {LIMIT // 8}
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    assert error.errno == errno.EMFILE
for _ in range(1000):
    os.close(descriptors.open_file(sys.argv[1], os.O_WRONLY | os.O_CREAT))
kept = [descriptors.open_file(sys.argv[1], os.O_RDONLY) for _ in range({LIMIT // 8})]
descriptors.PATIENCE_S = 0.05
try:
    descriptors.open_file(sys.argv[1], os.O_RDONLY)
except OSError as error:
    assert error.errno == errno.EMFILE
else:
    raise SystemExit("there was no end of descriptors")
try:
    descriptors.open_file("/no such/folder", os.O_RDONLY)
except OSError as error:
    assert error.errno in (errno.EMFILE, errno.ENOENT)
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "file"], check=True)
    assert descriptors.KEPT > LIMIT // 8
