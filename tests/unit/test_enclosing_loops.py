"""Which lines of a script lie inside a loop of its own."""

import contextlib
import sys
import types

import pytest

from paceline.worker.enclosing_loops import INSTALLED, is_in_loop


class Asked:
    """Stands for `session.batches(...)`: iterating over it asks whether that is done in a loop."""

    def __init__(self, answers):
        self.answers = answers

    def __iter__(self):
        self.answers.append(is_in_loop(sys._getframe(1)))
        return iter([1, 2])


def answers_of(script):
    """Run a script as an engine does, from a module that belongs to paceline."""
    answers = []
    exec("script(asked)", {"__name__": "paceline.test", "script": script, "asked": Asked(answers)})
    return answers


def one_loop(asked):
    for _ in asked:
        pass


def two_in_a_row(asked):
    for _ in asked:
        pass
    for _ in asked:
        pass


def after_a_loop(asked):
    for _ in range(3):
        with contextlib.suppress(ValueError):
            int("x")
    for _ in asked:
        pass


def after_a_loop_with_continue(asked):
    for number in range(3):
        try:
            int("x")
        except ValueError:
            continue
        print(number)
    for _ in asked:
        pass


def in_a_try(asked):
    try:
        with contextlib.suppress(ValueError):
            for _ in asked:
                pass
    except KeyError:
        pass
    finally:
        asked.answers.append(False)


def comprehension(asked):
    return [number + 1 for number in asked], {number: number for number in asked}, sum(number + 1 for number in asked)


def wrapped(asked):
    for _ in enumerate(zip(asked, asked, strict=True)):
        pass


def passed_on(asked):
    for number in asked:
        yield number + 1


def delegated(asked):
    yield from passed_on(asked)


def through_a_generator(asked):
    for _ in passed_on(asked):
        pass
    for _ in delegated(asked):
        pass


def by_hand(asked):
    numbers = iter(asked)
    while next(numbers, None) is not None:
        pass


def called(asked):
    one_loop(asked)


@pytest.mark.parametrize(
    "script",
    [
        one_loop, two_in_a_row, after_a_loop, after_a_loop_with_continue, in_a_try, comprehension, wrapped,
        through_a_generator, by_hand, called,
    ],
)  # fmt: skip
def test_a_loop_over_the_batches_alone_is_none_of_the_scripts_own(script):
    answers = answers_of(script)
    assert answers
    assert not any(answers)


def in_for(asked):
    for _ in range(3):
        for _ in asked:
            pass


def in_while(asked):
    left = 3
    while left:
        left -= 1
        for _ in asked:
            pass


def in_while_true(asked):
    left = 3
    while True:
        for _ in asked:
            pass
        left -= 1
        if not left:
            break


def in_try_in_for(asked):
    for _ in range(3):
        try:
            for _ in asked:
                pass
        except ValueError:
            continue


def called_in_for(asked):
    def train():
        one_loop(asked)

    for _ in range(3):
        train()


def generator_in_for(asked):
    for _ in range(3):
        for _ in delegated(asked):
            pass


def epochs_of(asked):
    for _ in range(3):
        yield from asked


def loop_in_a_generator(asked):
    for _ in epochs_of(asked):
        pass


def nested_comprehension(asked):
    return [number for _ in range(3) for number in asked]


def comprehension_in_for(asked):
    return [list(asked) for _ in range(3)]


def function_in_a_comprehension(asked):
    return [one_loop(asked) for _ in range(3)]


@pytest.mark.parametrize(
    "script",
    [
        in_for, in_while, in_while_true, in_try_in_for, called_in_for, generator_in_for, loop_in_a_generator,
        nested_comprehension, comprehension_in_for, function_in_a_comprehension,
    ],
)  # fmt: skip
def test_a_loop_around_it_is_found(script):
    assert answers_of(script) == [True] * 3


def call_in_a_loop(call):
    for _ in range(1):
        call()


@pytest.mark.parametrize(("module", "counts"), [("a_library", False), ("scripts", True)])
def test_loops_of_installed_packages_count_only_if_they_are_the_script(module, counts):
    installed = call_in_a_loop.__code__.replace(co_filename=f"{INSTALLED[-1]}/{module}/running.py")
    calling = types.FunctionType(installed, {"__name__": f"{module}.running", "range": range})
    within = types.FunctionType(one_loop.__code__, {"__name__": "scripts.train"})
    assert answers_of(lambda asked: calling(lambda: within(asked))) == [counts]


def test_the_callers_of_the_run_do_not_count():
    for _ in range(2):
        assert answers_of(one_loop) == [False]
