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


class GrammarDelayed(Overloaded):
    """A grammar was not compiled in time, by no fault of its own: the machine is busy; retry."""

    code = "grammar_compile_delayed"


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


class AdapterError(PlaitError):
    """Something is wrong with an adapter, or with a wish about one. Base of the errors below.

    `report` tells what was found, where loading came so far.
    """

    code = "invalid_lora_adapter"
    type = "invalid_request_error"
    status = 400

    def __init__(
        self, message: str, *, param: str | None = None, report: object | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.report = report


class InvalidAdapter(AdapterError):
    """Not an adapter of this model: format, key, tensor or value; the message says which."""


class AdapterRankExceeded(AdapterError):
    """A rank above `--max-adapter-rank`."""

    code = "lora_rank_limit_exceeded"


class InvalidAdapterName(AdapterError):
    """A name with characters that names may not have, or that of a served model."""

    code = "invalid_lora_name"


class AdapterAlreadyLoaded(AdapterError):
    """The name is taken and nothing was said about replacing."""

    code = "lora_adapter_already_loaded"


class InvalidLoadPolicy(AdapterError):
    """Wishes about loading that contradict each other."""

    code = "invalid_lora_load_policy"


class AdapterPathNotFound(AdapterError):
    """There is nothing at the path."""

    code = "adapter_path_not_found"
    status = 404


class AdapterPathForbidden(AdapterError):
    """The path leads out of the adapter directory, or there is none."""

    code = "adapter_path_forbidden"
    status = 403


class AdapterFileChanged(AdapterError):
    """A file changed while it was read."""

    code = "adapter_file_changed"
    status = 409


class AdapterFileTooLarge(AdapterError):
    """A file is larger than an adapter's may be."""

    code = "lora_adapter_file_too_large"
    status = 413


class AdapterLimitExceeded(AdapterError):
    """As many adapters are loaded as may be."""

    code = "lora_adapter_limit_exceeded"
    status = 409


class AdapterBytesExceeded(AdapterError):
    """The adapter can never fit the memory for adapters, or fits no longer."""

    code = "lora_byte_limit_exceeded"
    status = 409


class AdapterBusy(AdapterError):
    """The name is being loaded already; retry after `retry_after_s`."""

    code = "lora_load_busy"
    status = 429
    type = "overloaded_error"
    retry_after_s = 1.0


class AdapterGenerationMismatch(AdapterError):
    """The name's generation is not the expected one."""

    code = "lora_generation_mismatch"
    status = 409


class AdapterNotFound(AdapterError):
    """No adapter of that name is loaded."""

    code = "lora_adapter_not_found"
    status = 404


class AdapterUnavailable(AdapterError):
    """This server serves no adapters."""

    code = "lora_runtime_unavailable"
    status = 409


class AdapterStorageFailed(AdapterError):
    """The store of adapters cannot be read or written."""

    code = "lora_storage_unavailable"
    type = "internal_error"
    status = 503


class AdapterPlacementFailed(AdapterError):
    """A checked adapter could not be placed on the device."""

    code = "lora_device_load_failed"
    type = "internal_error"
    status = 503


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


class InvalidImage(BadRequest):
    """Not an image that is taken: format, damage, size; the message says which."""

    code = "invalid_image"


class ImageTooLarge(InvalidImage):
    """An image, or all images of a request together, beyond a bound that the message names."""

    code = "image_too_large"


class ImageFetchFailed(InvalidImage):
    """An image's address that may not be fetched, or could not be."""

    code = "image_fetch_failed"


class ConfigError(PlaitError):
    """A flag, or a combination of flags, cannot hold; the message names a value that would."""

    code = "invalid_config"
    type = "invalid_request_error"
    status = 400


class InternalError(PlaitError):
    """A fault of ours that ended one request."""


class GrammarFault(InternalError):
    """A grammar's matcher broke down; the answer that it was for ends."""

    code = "grammar_internal_error"


def by_code(code: str) -> type[PlaitError]:
    """The error class of a wire code; `InternalError` where it is unknown."""
    classes: list[type[PlaitError]] = [PlaitError]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    return next((c for c in reversed(classes) if c.code == code), InternalError)
