"""Every error that a user can meet: a stable code, an HTTP status, and what to do."""

from __future__ import annotations


class PlaitError(Exception):
    """Base of all errors that are the user's to see.

    `message` says what is wrong and what to do; `param` names the field or flag at fault.
    """

    code = "internal_error"
    type = "internal_error"
    status = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(PlaitError):
    """A request field has a value that cannot be served."""

    code = "invalid_value"
    type = "invalid_request_error"
    status = 400


class ContextLengthExceeded(BadRequest):
    """Prompt (plus max_tokens) does not fit the context, or can never fit the KV memory."""

    code = "context_length_exceeded"


class Unsupported(BadRequest):
    """Something valid elsewhere that this server does not serve; the message names it."""

    code = "unsupported"


class ModelNotFound(PlaitError):
    """No model or adapter of that name is served."""

    code = "model_not_found"
    type = "invalid_request_error"
    status = 404


class Unauthorized(PlaitError):
    """Missing or wrong API key."""

    code = "invalid_api_key"
    type = "authentication_error"
    status = 401


class DeadlineExceeded(PlaitError):
    """The request's deadline passed before its answer was complete."""

    code = "deadline_exceeded"
    type = "timeout_error"
    status = 408


class Overloaded(PlaitError):
    """The queue is full or the server drains; retry after `retry_after_s`."""

    code = "overloaded"
    type = "overloaded_error"
    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDied(PlaitError):
    """The engine process ended or restarted while the request ran; it can be retried."""

    code = "engine_unavailable"
    type = "overloaded_error"
    status = 503


class ModelUnsupported(PlaitError):
    """The checkpoint cannot be loaded or served; the message says exactly why."""

    code = "model_unsupported"
    type = "invalid_request_error"
    status = 400


class UnsupportedSchemaKeyword(BadRequest):
    """A schema keyword that no backend enforces; the message has its JSON pointer."""

    code = "unsupported_schema_keyword"


class InvalidSchema(BadRequest):
    """A JSON schema that is none."""

    code = "invalid_schema"


class InvalidRegex(BadRequest):
    """A regular expression that cannot be read."""

    code = "invalid_regex"


class InvalidGrammar(BadRequest):
    """A grammar, choice list or structural tag that cannot be read."""

    code = "invalid_grammar"


class GrammarTooComplex(BadRequest):
    """A grammar beyond a bound of size, time or memory, which the message names."""

    code = "grammar_too_complex"


class ConfigError(PlaitError):
    """A flag, or a combination of flags, cannot hold; the message names a value that would."""

    code = "invalid_config"
    type = "invalid_request_error"
    status = 400


class InternalError(PlaitError):
    """A fault of ours that ended one request."""


def by_code(code: str) -> type[PlaitError]:
    """The error class of a wire code; `InternalError` where it is unknown."""
    classes: list[type[PlaitError]] = [PlaitError]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    return next((c for c in reversed(classes) if c.code == code), InternalError)
