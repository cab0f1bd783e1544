"""Random and mutated input for everything that a person may write: settings, strategies, scenario files, journals.

Input is answered with exit code 2 and one line, or it is understood. A fault is anything else: an exception that is no
`UserError`, a message of several lines, or an exit code beyond 2.
"""

import gzip
import random
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline import strategies
from paceline.cli import main
from paceline.cli.run_command import settle
from paceline.core import settings
from paceline.core.errors import UserError
from paceline.core.scenario import file as scenarios
from paceline.core.scenario.costs import Times
from paceline.core.scenario.file import describe
from paceline.core.values import shown
from paceline.engines import capabilities
from paceline.records.replay import replay

KINDS = ("setting", "strategy", "scenario", "journal")
BY_COMMAND = 40  # one in so many goes through the whole command line
VIRTUAL = 10_000  # workers up to which a scenario's times are computed too

WORDS = [
    "", " ", "0", "-1", "1", "4", "2.5", "1e400", "-1e400", "nan", "inf", "-inf", "none", "off", "true", "no", "1_000",
    "9" * 400, "9" * 5000, "1e-400", "0x10", "٣", "½", "\0", "a\0b", "\ud800", "\udcff", "\n", "a\nb", "\r\n\t", "💥",
    "[" * 2000, "{" * 2000, "'", '"', ":", "::", "=", ",", "/", "=1", "a=", "a=b=c", "lr=0.1", "~", "~nobody/x", ".",
    "..", "/", "/dev/null", "/dev/zero", "x" * 300, "x/" * 3000, "bsp", "ssp:staleness=3", "dsap", "mine.py:Mine",
    "no.such:Class", "os:path", "50v", "0.1e", "10s", "0v", "9" * 400 + "v", "accuracy=0.9", "loss<=nan", "loss<=1e999",
    "even4", "uneven8", "sim", "local", "fresh",
]  # fmt: skip
NESTED = [b"[" * 100_000, b"{" * 5000, b'{"a":' * 100_000, b"a = " + b"[" * 100_000, b"a." * 50_000 + b"a = 1\n"]
TOKENS = [
    b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b'"', b"[", b"]", b"{", b"}", b",", b":", b"=", b"-", b"nan", b"inf",
    b"1e999", b"9" * 400, b"9" * 5000, b"0x" + b"f" * 5000, b"true", b"null", b'""', b"-1", b"0", b"1e308", b"1e-320",
    b"9223372036854775807", b"18446744073709551616", b"[[workers]]", b"[run]\n", b"trace:x.csv", b"trace:.:a:b",
    b"lognormal:", b"\\ud800", b"seed", b"count = 10000000\n", b'"kind":"grant"', b"10000000", b"[[events]]\n",
]  # fmt: skip


class Fault(msgspec.Struct):
    """An input that was answered in some other way."""

    kind: str
    given: str
    what: str


class Fuzzer:
    """Makes input from a seed and counts how it was answered."""

    def __init__(self, seed: int, folder: Path, journals: list[bytes]) -> None:
        self._chance = random.Random(seed)
        self._folder = folder
        self._journals = journals
        self._scenarios = [scenarios.builtin_text(name).encode() for name in scenarios.builtin_names()]
        self._specs = [*strategies.names(), *strategies.peer_names(), "ssp:staleness=3", "adaptive_k_load:loads=1/2/4"]
        self.answers: Counter[tuple[str, str]] = Counter()
        self.faults: list[Fault] = []

    def run(self, cases: int) -> None:
        """Try so many inputs, of each kind in turn."""
        makers = {
            "setting": self._setting,
            "strategy": self._strategy,
            "scenario": self._scenario,
            "journal": self._journal,
        }
        for number in range(cases):
            kind = KINDS[number % len(KINDS)]
            given, call, arguments = makers[kind]()
            if number // len(KINDS) % BY_COMMAND:
                self._attempt(kind, given, call)
            else:
                self._command(kind, given, arguments)

    def _attempt(self, kind: str, given: str, call: Callable[[], object]) -> None:
        try:
            call()
        except UserError as error:
            self.answers[kind, "refused"] += 1
            if not str(error).strip() or len(str(error)) > 5000:
                self.faults.append(Fault(kind, given, f"a message that helps nobody: {str(error)[:200]}"))
        except Exception:  # noqa: BLE001 - any other one is what is looked for
            self.faults.append(Fault(kind, given, traceback.format_exc()))
        else:
            self.answers[kind, "understood"] += 1

    def _command(self, kind: str, given: str, arguments: list[str]) -> None:
        code = main(arguments)
        self.answers[kind, f"exit code {code}"] += 1
        if code not in (0, 1, 2):
            self.faults.append(Fault(kind, given, f"exit code {code}"))

    # -- makers: the input in words, the function to call with it, and the command that does the same ------------------

    def _setting(self) -> tuple[str, Callable[[], object], list[str]]:
        chance = self._chance
        setting = chance.choice(list(settings.SETTINGS.values()))
        text = self._text(setting.default_text or chance.choice(WORDS))
        sources: list[dict[str, object]] = [{}, {}, {}]
        place = chance.choice([0, 1, 2])
        native = [text, text, 10**400, 1e308, -0.0, True, [], {"a": {}}, {"a": 10**5000}, [[]], {text: text}, 16**5000]
        sources[place] = {
            setting.variable if place == 1 else setting.written: chance.choice(native) if place == 2 else text
        }

        def call() -> None:
            on_command_line, variables, in_run = sources
            settle(on_command_line, variables) if not in_run else None  # type: ignore[arg-type]
            config = settings.resolve(on_command_line, variables, in_run)  # type: ignore[arg-type]
            settings.require_possible(config, capabilities(config.engine))
            strategies.checked(config.strategy, config.seed, 4)
            msgspec.json.encode(msgspec.to_builtins(config, enc_hook=str))

        command = ["run", f"{setting.flag}={text}", "--task", "no such task"]
        return f"{setting.name} from {shown(sources)}", call, command if setting.default is not False else command[2:]

    def _strategy(self) -> tuple[str, Callable[[], object], list[str]]:
        chance = self._chance
        spec = chance.choice(self._specs)
        if chance.random() < 0.7:
            name = spec.partition(":")[0]
            options = strategies.describe(strategies.machine_class(name)).options
            values = [chance.choice([*WORDS, str(chance.uniform(-9, 99))]) for _ in range(chance.randrange(4))]
            given = [f"{chance.choice(options).name}={value}" for value in values if options]
            spec = f"{name}:{','.join(given)}" if given else name
        if chance.random() < 0.5:
            spec = self._text(spec)
        return repr(spec), lambda: strategies.checked(spec, 0, 4), ["strategies", spec]

    def _scenario(self) -> tuple[str, Callable[[], object], list[str]]:
        data = self._mutated(self._chance.choice(self._scenarios))
        path = self._folder / "made.toml"

        def call() -> None:
            describe(scenarios.load(str(path)))
            cluster = scenarios.load(path)
            settings.resolve({}, {}, cluster.run)
            if cluster.count <= VIRTUAL:
                times = Times(cluster)
                times.compute_s(0, 0, 64, 0.0)
                times.latency_s(0, 0, upward=True)

        path.write_bytes(data)
        return repr(data), call, ["scenario", str(path)]

    def _journal(self) -> tuple[str, Callable[[], object], list[str]]:
        data = self._mutated(self._chance.choice(self._journals))
        zipped = self._chance.random()
        path = self._folder / ("made.jsonl.gz" if zipped < 0.2 else "made.jsonl")
        if zipped < 0.1:
            data = self._mutated(gzip.compress(data, 1))
        elif zipped < 0.15:
            data = gzip.compress(data, 1)
        path.write_bytes(data)
        return repr(data), lambda: replay(path), ["replay", str(path)]

    # -- mutations -----------------------------------------------------------------------------------------------------

    def _text(self, start: str) -> str:
        chance = self._chance
        text = chance.choice(WORDS) if chance.random() < 0.5 else start
        for _ in range(chance.randrange(4)):
            place = chance.randrange(len(text) + 1)
            new = chance.choice(WORDS) if chance.random() < 0.6 else chr(chance.randrange(0x110000))
            text = text[:place] + new + text[place + chance.randrange(3) :]
        return text

    def _mutated(self, data: bytes) -> bytes:
        chance = self._chance
        if chance.random() < 0.02:
            return chance.choice(NESTED) + (b"\n" if chance.random() < 0.5 else data)
        for _ in range(chance.randrange(6)):
            place = chance.randrange(len(data) + 1)
            match chance.randrange(6):
                case 0:
                    data = data[:place] + chance.choice(TOKENS) + data[place:]
                case 1:
                    data = data[:place] + chance.randbytes(chance.randrange(1, 4)) + data[place + 1 :]
                case 2:
                    data = data[:place] + data[place + chance.randrange(1, 40) :]
                case 3:
                    data = data[:place] + data[place : place + 80] + data[place:]
                case 4:
                    data = data[:place] if chance.random() < 0.3 else data
                case 5:  # another value after a sign of equality or a colon
                    places = [at for at, byte in enumerate(data[:20_000]) if byte in b"=:"]
                    if places:
                        at = chance.choice(places) + 1
                        end = next((n for n in range(at, len(data)) if data[n] in b",}\n"), len(data))
                        data = data[:at] + b" " + chance.choice(TOKENS) + data[end:]
        return data
