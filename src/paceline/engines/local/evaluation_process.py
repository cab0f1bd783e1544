"""The evaluator's process as the server sees it: a reader of versions that trained workers never wait for."""

from collections.abc import Callable

from paceline.core.errors import PeerError
from paceline.engines.local.members import Member
from paceline.engines.local.processes import how_it_ended
from paceline.model.store import Parameters
from paceline.server.run_control import Conduct
from paceline.transport.messages import Evaluate


class Evaluator:
    """Who measures versions, if anybody does."""

    def __init__(
        self,
        conduct: Conduct,
        version_for: Callable[[Member], Parameters],
        refresh: Callable[[Callable[[], None]], None],
        *,
        awaited: bool,
    ) -> None:
        """`refresh` sees to it that the store holds what is to be measured, and then goes on."""
        self._conduct = conduct
        self._refresh = refresh
        self._version_for = version_for
        self.member: Member | None = None
        self.awaited = awaited  # the first phase does not begin without it

    def greet(self) -> bool:
        """It may have prepared its model; whether it is thereby ready."""
        member = self.member
        if member is None or member.hello is None:
            return False
        self._conduct.store.spec.require_same(member.hello.spec, member.worker)
        member.hello = None
        self.awaited = False
        self._conduct.evaluate_with(self._measure)
        return True

    def exited(self, member: Member, code: int) -> None:
        """The process is no more."""
        member.gone = True
        conduct = self._conduct
        if self.member is member and code != 0 and (conduct.active or conduct.measuring):
            text = f"the evaluator's process {how_it_ended(code)}: the model is not evaluated any more"
            if conduct.config.target is not None and conduct.active:
                raise PeerError(f"{text}, and the target {conduct.config.target} cannot be seen")
            conduct.remark(text)
        self.give_up()

    def give_up(self) -> None:
        """Nobody measures versions any more, or ever did."""
        self._conduct.give_up_measuring()
        self.awaited = False

    def _measure(self, number: int) -> None:
        self._refresh(lambda: self._ask(number))

    def _ask(self, number: int) -> None:
        member = self.member
        if member is None or member.gone:  # while the models came together; that was said when it went
            self.give_up()
            return
        member.link.deliver(Evaluate(number, self._version_for(member)))
