"""The guard that holds "never slower": what each source cost in time, against what it earned.

A source's account grows by the time that its accepted drafts would have taken without it, and
shrinks by the time of its rows and of its drafting. What it earned it may lose again. Beyond that
all sources live on one allowance: half a step at the start, and one hundredth of the time that
steps would take without drafts. So useless drafts of any number of sources cost at most that:
1.8 % of a run of 64 steps, 1 % of a long one.

Text that a grammar forces lives on an allowance of its own, of the same size. It nearly always
holds, and must not wait for what others have lost: behind the first draft of a cold model, which
may take a whole step, a hundred steps would go by without any of it.

A source whose drafts nobody chooses is probed: some of its drafts are verified though they do not
seem to pay, out of the allowance, after 8 steps and then after every 64, or once the load has
halved. A probe that earned more than it cost is followed by another at once, until the estimates
have seen enough to choose for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FIRST_ALLOWANCE = 0.5  # steps
ALLOWANCE = 0.01  # of the time without drafts
MAX_ALLOWANCE = 1.0  # steps; what is not spent is not hoarded
# What a source may lose of its winnings, once its drafts turn bad.
MAX_SAVED = 4.0  # steps
SAVED_HALF_LIFE = 256  # steps
FIRST_PROBE, NEXT_PROBE = 8, 64  # steps in which nothing was chosen
OWN_PURSE = frozenset({"grammar"})  # sources that share no allowance
_DECAY = 0.5 ** (1 / SAVED_HALF_LIFE)


@dataclass(slots=True)
class _Account:
    saved_s: float = 0.0  # earned and not lost again; never negative
    num_idle: int = 0  # steps since one of its drafts was verified
    probe_after: int = FIRST_PROBE
    load: int = 0  # sequences that were decoding when it was last verified or probed
    is_probing: bool = False
    cost_s: float = 0.0  # all that it ever cost and earned, for reports
    earned_s: float = 0.0


class Ledger:
    """The accounts of all sources."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._allowances_s: dict[str, float] = {}  # by purse
        self._load = 0

    def begin(self, plain_s: float, num_decoding: int) -> None:
        """A step is about to be planned; without drafts it would take `plain_s`."""
        for purse in ("", *OWN_PURSE):
            had = self._allowances_s.get(purse, FIRST_ALLOWANCE * plain_s)
            grown = had + ALLOWANCE * plain_s
            self._allowances_s[purse] = min(grown, MAX_ALLOWANCE * plain_s)
        self._load = num_decoding
        for account in self._accounts.values():
            account.saved_s = min(account.saved_s * _DECAY, MAX_SAVED * plain_s)
            account.num_idle += 1
            account.is_probing = False
            if 2 * num_decoding <= account.load:
                account.load = num_decoding
                account.num_idle = max(account.num_idle, account.probe_after)

    def risk_s(self, sources: Iterable[str]) -> float:
        """What a step may spend on these sources together, should all their drafts be wrong."""
        sources = set(sources)
        saved = sum(self._account(source).saved_s for source in sources)
        purses = {_purse(source) for source in sources}
        return saved + sum(max(self._allowances_s.get(p, 0.0), 0.0) for p in purses)

    def is_due(self, source: str) -> bool:
        """Whether a probe is due."""
        account = self._account(source)
        return account.num_idle >= account.probe_after

    @property
    def any_due(self) -> bool:
        """Whether a probe of any source is due."""
        return any(a.num_idle >= a.probe_after for a in self._accounts.values())

    def is_asleep(self, source: str) -> bool:
        """Whether to make no drafts at all: nobody chose any lately and no probe is due."""
        account = self._account(source)
        return FIRST_PROBE <= account.num_idle < account.probe_after

    def probing(self, source: str) -> None:
        """This step probes the source."""
        self._account(source).is_probing = True

    def spend(self, source: str, seconds: float) -> None:
        """Drafting took `seconds`, whatever comes of it."""
        self._book(source, seconds, 0.0)

    def settle(self, source: str, cost_s: float, earned_s: float) -> None:
        """Rows of this source were verified in a step: what they took, and what they saved."""
        account = self._account(source)
        self._book(source, cost_s, earned_s)
        account.num_idle = 0
        account.load = self._load
        if not account.is_probing:
            account.probe_after = FIRST_PROBE
        else:
            account.probe_after = 1 if earned_s > cost_s else NEXT_PROBE

    def report(self) -> dict[str, tuple[float, float]]:
        """For each source the seconds that it cost and those that it earned."""
        return {s: (a.cost_s, a.earned_s) for s, a in self._accounts.items()}

    def _book(self, source: str, cost_s: float, earned_s: float) -> None:
        account = self._account(source)
        account.cost_s += cost_s
        account.earned_s += earned_s
        account.saved_s += earned_s - cost_s
        if account.saved_s < 0:
            # May fall below nothing where a step was dearer than foreseen: it is paid off first.
            purse = _purse(source)
            self._allowances_s[purse] = self._allowances_s.get(purse, 0.0) + account.saved_s
            account.saved_s = 0.0

    def _account(self, source: str) -> _Account:
        account = self._accounts.get(source)
        if account is None:
            account = self._accounts[source] = _Account()
        return account


def _purse(source: str) -> str:
    return source if source in OWN_PURSE else ""
