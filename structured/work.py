"""One compile as the pool has it: what is asked, who waits for it, and in which order."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.platform.errors import GrammarDelayed, GrammarTooComplex, InternalError, InvalidSchema
from plait.structured import frames
from plait.structured.spec import CompiledGrammar

if TYPE_CHECKING:
    from plait.structured.spec import GrammarSpec
    from plait.structured.vocabulary import Vocabulary

MAX_CONTENT_BYTES = 1 << 20  # the router's own bounds are lower; this one is for what reads it

Outcome = CompiledGrammar | frames.Refused


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One compile, for all who wait for it."""

    key: str
    tenant: str
    job: frames.Job
    vocabulary: Vocabulary
    outcome: Future[Outcome]


class FairQueue:
    """Work in the order of arrival for each tenant, the tenants in turn."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[Work]] = OrderedDict()

    def put(self, work: Work) -> None:
        """Behind all others of its tenant."""
        self._tenants.setdefault(work.tenant, deque()).append(work)

    def get(self) -> Work:
        """Take out the next, of which there is one."""
        tenant, waiting = next(iter(self._tenants.items()))
        work = waiting.popleft()
        self._tenants.move_to_end(tenant)
        if not waiting:
            del self._tenants[tenant]
        return work

    def __bool__(self) -> bool:
        return bool(self._tenants)


def job_of(spec: GrammarSpec, vocabulary: Vocabulary) -> frames.Job:
    """What a worker is asked. Raises for content that is no JSON, or far too much."""
    try:
        content, options = json.dumps(spec.content), json.dumps(spec.options, sort_keys=True)
    except RecursionError:
        raise GrammarTooComplex("it is nested too deeply", param=spec.param) from None
    except (TypeError, ValueError) as error:
        raise InvalidSchema(f"it is no JSON: {error}", param=spec.param) from None
    if len(content) + len(options) > MAX_CONTENT_BYTES:
        raise GrammarTooComplex(
            f"it has more than {MAX_CONTENT_BYTES:,} bytes, which is the limit", param=spec.param
        )
    return frames.Job(
        digest=vocabulary.digest,
        kind=spec.kind,
        content=content,
        param=spec.param,
        strict=spec.strict,
        options=options,
    )


def flight_key(key: str, param: str) -> str:
    """Who may share an outcome: an error names the field; a grammar does not."""
    return f"{key} {param}"


def internal(text: str, work: Work) -> frames.Refused:
    """The outcome of a work that failed by our fault."""
    return frames.Refused(InternalError.code, text, work.job.param)


def delayed(text: str, work: Work) -> frames.Refused:
    """The outcome of a work that the machine did not get to; not its own fault."""
    message = f"the grammar is not compiled yet: {text}. Retry shortly"
    return frames.Refused(GrammarDelayed.code, message, work.job.param)


def too_complex(text: str, work: Work) -> frames.Refused:
    """The outcome of a work that went beyond a limit."""
    message = f"the grammar is too complex: {text}. Simplify it or make it smaller"
    return frames.Refused(GrammarTooComplex.code, message, work.job.param)
